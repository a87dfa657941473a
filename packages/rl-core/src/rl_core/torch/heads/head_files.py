"""The language-model head of another model, read from its files."""

from __future__ import annotations

import json
from collections.abc import Set
from functools import cache

import torch
from torch import Tensor

from rl_core.hf_config import HFConfig
from rl_core.model import HeadFiles
from rl_core.torch.files.model_files import WeightFiles, model_folder, read_hf_config
from rl_core.torch.heads.logprobs import Head, logit_transform


@cache
def read_head(files: HeadFiles, start: int = 0, stop: int | None = None) -> Head:
    """Rows `start` to `stop` of a model's head, on the CPU, in the model's precision. They are kept for the next call.

    Raises:
        ValueError: If the files have no such tensor.
    """
    folder = model_folder(files.model_name)
    config = read_hf_config(folder, json.loads(files.overrides))
    weights = WeightFiles.of(folder)
    dtype: torch.dtype = getattr(torch, files.precision)
    weight, bias = _names(config, weights.names, files.model_name)
    with weights.open() as opened:
        found = [opened.read(name, (slice(start, stop),)).to(dtype) for name in (weight, bias) if name]
    return Head(found[0], found[1] if bias else None, logit_transform(config))


def _names(config: HFConfig, stored: Set[str], model_name: str) -> tuple[str, str | None]:
    """Names of weight and bias of the head in the files; the weight may be stored as the embedding's."""
    # comes with the backends' transformers, as in `read_hf_config`
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def stored_as(parameter: Tensor) -> str | None:
        # the head's own name last in the model, and first here: files may hold other values under it
        aliases = [name for name, each in reversed(parameters.items()) if each is parameter]
        exact = [name for name in aliases if name in stored]
        # a family may keep its tensors under another prefix than its modules
        alike = [name for name in sorted(stored) if any(name.endswith(f".{alias}") for alias in aliases)]
        return next(iter([*exact, *alike]), None)

    weight = stored_as(head.weight)
    bias = None if getattr(head, "bias", None) is None else stored_as(head.bias)
    if weight is None:
        raise ValueError(
            f"{model_name}: its files do not have the weight of its head under a name of {type(model).__name__}; save "
            "the model with save_pretrained(), or compare its most likely tokens only"
        )
    return weight, bias
