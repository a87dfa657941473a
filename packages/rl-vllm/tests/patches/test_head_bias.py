"""Heads with a bias, of a model that vLLM runs with the code of transformers, after a weight sync."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from spoilable_generator import SpoilableGenerator
from torch import Tensor, nn
from transformers import PhiConfig, PhiForCausalLM
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.causal import CausalMixin

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE, ReferenceModel, write_reference_model
from rl_core.testing.torch.weight_sender import SenderProcess
from rl_core.testing.weights import Bench, model_config, prompt
from rl_vllm import VllmConfig


class Loads(Base):
    """Takes in the weights of everything but the head."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {name for name, _ in weights}


class Model(CausalMixin, Loads):
    """The head of such a model of vLLM, and what loading its bias reads."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.lm_head = ParallelLMHead.__new__(ParallelLMHead)
        nn.Module.__init__(self.lm_head)
        self.lm_head.num_embeddings_per_partition, self.lm_head.params_dtype = 3, torch.float32
        self.lm_head.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)
        self.pp_group = SimpleNamespace(is_last_rank=True)
        self.device_config = SimpleNamespace(device="cpu")
        self.vllm_config = SimpleNamespace(load_config=SimpleNamespace(device=None))


def test_vllm_makes_another_bias_in_every_load() -> None:
    """Once this fails, the bias need not be kept any longer."""
    model, found = Model(), []
    for value in (1.0, 2.0):
        model.load_weights([("lm_head.bias", torch.full((3,), value))])
        found.append(model.lm_head.bias)
    assert found[0] is not found[1]
    assert torch.equal(found[1], torch.full((3,), 2.0))


def write_phi(folder: Path, seed: int) -> Path:
    """A Phi whose biases are random, with a tokenizer."""
    write_reference_model(folder, seed=seed)
    torch.manual_seed(seed)
    config = PhiConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.15,
    )
    model = PhiForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


@exhaustive
def test_a_head_serves_every_bias_that_it_is_sent(tmp_path: Path) -> None:
    first, second = (write_phi(tmp_path / str(seed), seed) for seed in (1, 2))
    # before the engine, which changes classes of transformers to run such a model
    expected = {folder: ReferenceModel(folder).score(prompt(40)) for folder in (first, second)}
    config, placement = VllmConfig(kv_cache_gib=0.25), Placement("cpu", awaits_weights=True)
    sender = SenderProcess()
    try:
        generator = SpoilableGenerator(GenerationConfig(), config, model_config(first), placement)
        bench = Bench(generator, first, second, sender)
        try:
            for folder, reloads in ((second, False), (first, False), (second, True), (first, True)):
                bench.runner.run(generator.spoil("reload", reloads))
                bench.runner.run(bench.sync(folder))
                found = bench.runner.run(generator.score(prompt(40)))
                np.testing.assert_allclose(found, expected[folder], atol=1e-3)
        finally:
            bench.runner.run(generator.close())
    finally:
        sender.close()
