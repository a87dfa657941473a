"""Names of the weights of SigLIP towers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.models.siglip import SiglipVisionModel, SiglipVisionTransformer
from vllm.model_executor.models.utils import AutoWeightsLoader

import rl_vllm.engine_worker
from rl_vllm.patches.siglip_names import _load_weights, unused_names


class Tower(SiglipVisionModel):
    """A tower with one layer."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.vision_model = nn.Module()
        self.vision_model.post_layernorm = nn.LayerNorm(2)


def weights(prefix: str) -> list[tuple[str, Tensor]]:
    return [(f"{prefix}post_layernorm.{name}", torch.full((2,), 3.0)) for name in ("weight", "bias")]


def test_vllm_does_not_know_the_names_of_transformers() -> None:
    """Once this fails, it need not be made to any longer."""
    assert vars(SiglipVisionModel)["load_weights"] is _load_weights
    with pytest.raises(ValueError, match="no module or parameter named 'post_layernorm'"):
        AutoWeightsLoader(Tower()).load_weights(weights(""))


def test_a_tower_takes_both_kinds_of_names() -> None:
    assert rl_vllm.engine_worker.EngineWorker
    for prefix in ("", "vision_model."):
        tower = Tower()
        assert len(tower.load_weights(weights(prefix))) == 2
        assert tower.vision_model.post_layernorm.weight.eq(3).all()


def test_only_the_head_of_a_tower_without_one_is_left_out() -> None:
    names = ["vision_tower.head.probe", "vision_tower.embeddings.patch_embedding.weight"]
    model, transformer = Tower(), nn.Module.__new__(SiglipVisionTransformer)
    nn.Module.__init__(transformer)
    model.vision_model = transformer
    for use_head in (False, True):
        transformer.use_head = use_head
        assert unused_names(model, names) == (set() if use_head else {"vision_tower.head.probe"})
    assert not unused_names(nn.Module(), names)
