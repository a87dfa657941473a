"""Which layers get adapters, and what adapters start from."""

import torch

from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import initial_down, is_adapted


def test_layers_are_chosen_by_whole_parts_of_their_names():
    named = LoraConfig(match_all_linear=False, target_modules=["q_proj", "mlp.up_proj"], exclude_modules=["1.q_proj"])
    assert is_adapted("layers.0.q_proj", named)
    assert is_adapted("q_proj", named)
    assert is_adapted("layers.0.mlp.up_proj", named)
    for other in ("layers.0.seq_proj", "layers.0.up_proj", "layers.1.q_proj", "layers.0.q_proj.base"):
        assert not is_adapted(other, named)
    everywhere = LoraConfig(exclude_modules=["q_proj"])
    assert is_adapted("layers.0.k_proj", everywhere)
    assert not is_adapted("layers.0.q_proj", everywhere)


def test_an_adapter_starts_the_same_in_every_process_and_unlike_its_neighbours():
    first = initial_down("layers.0.q_proj.weight", (8, 16), seed=1)
    assert first.dtype == torch.float32
    assert first.abs().max() <= 0.25
    assert torch.equal(first, initial_down("layers.0.q_proj.weight", (8, 16), seed=1))
    assert not torch.equal(first, initial_down("layers.1.q_proj.weight", (8, 16), seed=1))
    assert not torch.equal(first, initial_down("layers.0.q_proj.weight", (8, 16), seed=2))
