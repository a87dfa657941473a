"""The language model of a composite model, which takes images or sound as well: its config, and how its weights are
called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_core.facts.hf_config import HFConfig, with_overrides

LANGUAGE_PREFIX = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
"""Start of the name of each weight of the language model in the files of a composite model, which differs by family and
by the version of `transformers` that wrote them."""

HEAD = "lm_head."

KEY_MAPPING = {rf"^(?:language_model|text_model)\.{re.escape(HEAD)}": HEAD, LANGUAGE_PREFIX.pattern: "model."}
"""Names in these files to names in the language model, as `from_pretrained` takes them; the first pattern that fits
counts."""


_WRAPPED_TOWER = re.compile(r"^((?:model\.)?vision_tower\.)vision_model\.")
"""Start of the name of each weight of a SigLIP tower in files of `transformers` before 5.19, and of the hub."""


def language_config(config: HFConfig) -> Any:
    """Return the `transformers` config of a language model, or of the text of a composite model if `transformers`
    has a causal language model of that kind."""
    # torch's classes come with it.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    is_other = config.is_encoder_decoder or text.is_encoder_decoder
    if is_other or "text_config" not in config.sub_configs or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    # The composite model ties its head by its own word, if it has one.
    fields = config.to_dict()
    if "tie_word_embeddings" in fields:
        text.tie_word_embeddings = fields["tie_word_embeddings"]
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    text.architectures = [family.__name__]
    if text.dtype is None:
        text.dtype = config.dtype
    return text


def read_language_config(source: Path | str, overrides: Mapping[str, Any]) -> Any:
    """Return the config of the language model in a folder, or of a hub name, with overrides.

    Raises:
        ValueError: Naming overrides that are not fields of this config.
    """
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(source, trust_remote_code=False)
    config = language_config(whole)
    merged = _overridden(config, overrides)
    if config is whole:
        changed = {name: merged[name] for name in overrides}
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **changed)
    return type(config).from_dict(merged)


def read_composite_config(source: Path | str, overrides: Mapping[str, Any]) -> Any:
    """Return the config of the whole composite model in a folder, or of a hub name, with overrides of its text.

    Raises:
        ValueError: If it is not a composite model, or naming overrides that are not fields of its text.
    """
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(source, trust_remote_code=False)
    text = whole.get_text_config()
    if text is whole:
        raise ValueError(f"{whole.model_type} models see no images; set vision.enabled=false")
    if not overrides:
        return whole
    fields = {**whole.to_dict(), "text_config": _overridden(text, overrides)}
    if "tie_word_embeddings" in overrides:
        fields["tie_word_embeddings"] = overrides["tie_word_embeddings"]
    return type(whole).from_dict(fields)


def _overridden(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with overrides."""
    own = config.to_dict()
    unknown = sorted(set(overrides) - set(own))
    if unknown:
        raise ValueError(f"hf_config_overrides {unknown} are not fields of a {type(config).__name__}")
    return with_overrides(own, overrides)


def tower_names(stored: Iterable[str]) -> dict[str, str]:
    """Map each weight of a vision tower, as `transformers` writes it, to the other name that files have for
    them."""
    renamed = {_WRAPPED_TOWER.sub(r"\1", name): name for name in stored}
    return {name: other for name, other in renamed.items() if name != other}


def language_names(stored: Iterable[str]) -> dict[str, str]:
    """Map each weight of the language model to its name in the files of a composite model."""
    found = {}
    for name in stored:
        short = LANGUAGE_PREFIX.sub("", name)
        if short.startswith(HEAD):
            found[short] = name
        elif short != name:
            found[f"model.{short}"] = name
    return found
