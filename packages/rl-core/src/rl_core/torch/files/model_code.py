"""Models whose classes come with their files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.facts.model_code import CLASSIFIER_CLASS, CONFIG_CLASS, MODEL_CLASS, code_problem


def run_model_code(folder: Path, trusted: str) -> None:
    """Import the classes of a model's own code in this process, so that `transformers` has its type afterwards.

    Args:
        folder: Folder of the model.
        trusted: Digest of the code that may run.

    Raises:
        ConfigError: If the folder has other code; nothing of it is run then.
    """
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if problem := code_problem(folder, fields, trusted):
        raise ConfigError(f"trust_remote_code: {problem}, and {trusted} is trusted. Nothing of it was run")
    classes: dict[str, str] = fields["auto_map"]
    # These come with the backends, as in `read_hf_config`.
    import transformers
    from transformers import dynamic_module_utils

    # Each process imports its own copy, so that no other one writes these files meanwhile.
    with tempfile.TemporaryDirectory(prefix="rl_model_code_") as copies:
        shared, dynamic_module_utils.HF_MODULES_CACHE = dynamic_module_utils.HF_MODULES_CACHE, copies
        try:
            found: dict[str, Any] = {
                name: dynamic_module_utils.get_class_from_dynamic_module(classes[name], str(folder))
                for name in (CONFIG_CLASS, MODEL_CLASS, CLASSIFIER_CLASS)
                if name in classes
            }
        finally:
            dynamic_module_utils.HF_MODULES_CACHE = shared
    config = found.pop(CONFIG_CLASS)
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for name, model in found.items():
        model.config_class = config
        getattr(transformers, name).register(config, model, exist_ok=True)
