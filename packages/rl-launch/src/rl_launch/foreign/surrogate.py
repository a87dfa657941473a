"""The surrogate of a recipe."""

from __future__ import annotations

from typing import Any

from rl_algos.losses.surrogates import SURROGATES
from rl_launch.foreign.translation import Translation


def put_surrogate(config: Translation, name: str, keys: dict[str, str], **settings: Any) -> None:
    """Write a surrogate with its settings in place of what the recipe has there, and answer the keys of the settings.

    Args:
        config: Translation that receives the surrogate and the answers.
        name: Name of the surrogate here.
        keys: Setting of a surrogate by the key of the other system. Keys of settings that this surrogate does not have
            are answered as not needed; keys of settings that are not given here are left to the table.
        settings: Values of settings; None leaves the default. Those that the surrogate does not have are left out.
    """
    fields = SURROGATES[name].model_fields
    given = {setting: value for setting, value in settings.items() if setting in fields and value is not None}
    config.remove("loss_fn.surrogate")
    if section := ({} if name == "clip" else {"name": name}) | given:
        config.put("loss_fn.surrogate", section)
    for key, setting in keys.items():
        if setting in fields and setting in settings:
            config.follows([key], f"loss_fn.surrogate.{setting}")
        elif setting not in fields:
            config.unneeded(key, f"the surrogate {name} has no {setting}")
