"""Load the weights of SigLIP towers under the names that transformers gives them.

- Fault: transformers 5.19 writes the weights of a SigLIP tower as `vision_tower.embeddings...`. vLLM knows them only as
  `vision_tower.vision_model.embeddings...` and refuses a checkpoint or an update of Gemma 3 and LLaVA ("There is no
  module or parameter named 'vision_tower.embeddings'").
- vLLM 0.32.0, `vllm/model_executor/models/siglip.py`.
- Upstream: no upstream issue found on 2026-11-27.
- Delete when `tests/patches/test_siglip_names.py::test_vllm_does_not_know_the_names_of_transformers` fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from vllm.model_executor.models.siglip import SiglipVisionModel, SiglipVisionTransformer
from vllm.model_executor.models.utils import AutoWeightsLoader

HEAD = "vision_tower.head."
"""Part of the names of a tower's pooling head, which transformers keeps and vision-language models do not compute."""

INNER = "vision_model."
"""Beginning of vLLM's names within a tower."""


def name_siglip_weights() -> None:
    """Give vLLM's SigLIP tower a loader that takes both kinds of names."""
    SiglipVisionModel.load_weights = _load_weights


def unused_names(model: nn.Module, names: Iterable[str]) -> Collection[str]:
    """Return the names of weights that the engine's model has no use for, because its tower leaves out their head.

    Args:
        model: Model of the engine.
        names: Names of the weights that are sent.
    """
    towers = [module for module in model.modules() if isinstance(module, SiglipVisionTransformer)]
    return {name for name in names if HEAD in name} if towers and not any(each.use_head for each in towers) else set()


def _load_weights(self: SiglipVisionModel, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    renamed = ((name if name.startswith(INNER) else f"{INNER}{name}", tensor) for name, tensor in weights)
    loaded: set[str] = AutoWeightsLoader(self).load_weights(renamed)
    return loaded
