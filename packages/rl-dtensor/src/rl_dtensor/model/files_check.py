"""The check of a folder with a model, on a model without data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rl_core.torch.files.model_files import WeightFiles, read_hf_config
from rl_dtensor.model.weights import SCORE, Catalog

LM_HEAD = "lm_head.weight"


def files_problem(folder: Path, overrides: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return why a model cannot be trained from the files in a folder, whatever its head; empty if it can.

    Args:
        folder: Folder of the model.
        overrides: Fields of its Hugging Face config to replace.
        is_whole: True for a composite model that is not trained as its language model.
    """
    auto: Any = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    try:
        config = read_hf_config(folder, overrides, is_whole=is_whole)
        kind = config.model_type
        if type(config) not in auto._model_mapping:
            return f"{kind} models are not causal language models"
        with torch.device("meta"):
            hf = auto.from_config(config)
        catalog, files = Catalog.of(hf, lambda name: 0), WeightFiles.of(folder, is_whole=is_whole)
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # of any kind, from the code of a family
        return f"transformers cannot build the model of {folder}: {type(error).__name__}: {error}"
    heads = {LM_HEAD, *catalog.tied_in_files, *catalog.tied, SCORE}
    return catalog.problem(files, new=heads, foreign=heads)
