"""Heads with a bias, of a model that vLLM runs with the code of transformers, after a weight sync."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PhiConfig, PhiForCausalLM

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE, write_reference_model
from rl_core.testing.torch.weight_sender import SenderProcess
from rl_core.testing.weights import Bench, model_config, prompt
from rl_vllm import VllmConfig, VllmGenerator


class ReloadableGenerator(VllmGenerator):
    worker_extension = "spoilable_worker.SpoilableWorker"

    async def reload(self, *, reloads: bool) -> None:
        """Have vLLM's own reload take in what comes."""
        await self._running().call("reload", reloads)


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


def test_a_head_serves_every_bias_that_it_is_sent(tmp_path: Path) -> None:
    first, second = (write_phi(tmp_path / str(seed), seed) for seed in (1, 2))
    # an engine is not started twice in one process
    config, placement = VllmConfig(kv_cache_gib=0.25, own_process=True), Placement("cpu", awaits_weights=True)
    sender = SenderProcess()
    try:
        generator = ReloadableGenerator(GenerationConfig(), config, model_config(first), placement)
        bench = Bench(generator, first, second, sender)
        try:
            for folder, reloads in ((second, False), (first, False), (second, True), (first, True)):
                bench.runner.run(generator.reload(reloads=reloads))
                bench.runner.run(bench.sync(folder))
                found = bench.runner.run(generator.score(prompt(40)))
                expected = bench.references[folder].score(prompt(40))
                np.testing.assert_allclose(found, expected, atol=1e-3)
        finally:
            bench.runner.run(generator.close())
    finally:
        sender.close()
