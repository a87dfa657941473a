"""Models whose experts are split over ranks train, stream and resume as one process does."""

import experts_cases
import pytest
import torch
from transformers import AutoConfig

from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.plugins import MeshCase
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import ADAMW
from rl_dtensor.selfcheck import CHECK, check_of, write_tiny

BUILD = "rl_dtensor.selfcheck:build"
EXPERTS = {"expert_parallel_size": 2}
TENSOR = {"tensor_parallel_size": 2}
SPLIT_TOKENS = {**EXPERTS, **TENSOR, "sequence_parallel": True}

CASES = [
    # a family, ranks, settings, whether adapters train, also those of experts
    ("qwen3_moe", 4, {**EXPERTS, **TENSOR}, True),
    ("mixtral", 4, {**SPLIT_TOKENS, "expert_chunks": 2}, False),
    ("qwen3_moe", 4, {"expert_parallel_size": 4, "expert_chunks": 2, "recompute": "selective"}, False),
    ("deepseek_v3", 2, {**EXPERTS, "expert_chunks": 3, "recompute": "full"}, False),
    ("gpt_oss", 2, {**EXPERTS, "expert_chunks": 2}, True),
    ("llama4_text", 2, {**EXPERTS, "expert_chunks": 2}, False),
    ("mixtral", 4, SPLIT_TOKENS, False),
    ("deepseek_v3", 2, EXPERTS, False),
    ("deepseek_v3", 4, {**EXPERTS, **TENSOR}, False),  # shared experts split over tensor-parallel ranks
    ("mixtral", 4, {**EXPERTS, **TENSOR, "recompute": "full"}, False),
    ("qwen2_moe", 2, EXPERTS, True),  # shared experts first
    ("gpt_oss", 2, EXPERTS, False),  # experts with biases
    ("gpt_oss", 4, SPLIT_TOKENS, False),
    ("nemotron_h", 2, EXPERTS, False),  # experts without gates
    ("llama4_text", 2, EXPERTS, True),  # experts of this backend's own code
]


@pytest.mark.parametrize(
    ("family", "num_ranks", "settings", "lora"), partly_exhaustive(CASES, always=CASES[1:3]), ids=str
)
def test_split_experts_are_one_process(ranks, tmp_path, family, num_ranks, settings, lora):
    config = AutoConfig.for_model(family)
    folder = write_tiny(config, tmp_path / "model")
    check = check_of(AutoConfig.from_pretrained(folder))
    case = MeshCase("experts", num_ranks, settings, is_packed=family != "nemotron_h", has_adapters=lora)
    outcome = check.check_case(ranks, folder, case, check.expect(folder, has_adapters=lora))
    assert outcome.verdict == "exact", outcome


def test_a_checkpoint_of_split_experts_resumes_on_another_mesh(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("mixtral"), tmp_path / "model")
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=ADAMW)
    losses = []
    for num_ranks, settings in ((4, {**EXPERTS, **TENSOR}), (2, EXPERTS), (2, TENSOR)):
        with PooledModel(ranks, BUILD, config, ModelSpec(), num_ranks, **settings) as model:
            if losses:
                model.load(str(tmp_path / "checkpoint"))
            else:
                model.train_step(CHECK.batch(0), TokenLoss())
                model.save(str(tmp_path / "checkpoint"))
            losses.append(model.train_step(CHECK.batch(1), TokenLoss())["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


LEAVE, ARRIVE = ["send", "send"], ["arrive", "arrive"]
"""Choices and hidden states. Results, and their gradients, are sent alone."""
ONE_CHUNK = [*ARRIVE, "products", "send", "arrive"]
TWO_CHUNKS = [*ARRIVE, "products", "send", *ARRIVE, "products", "send", "arrive", "arrive"]
"""The second chunk is on its way under the products of the first one, whose results return under the others."""


@pytest.mark.parametrize(("num_chunks", "rest"), [(1, ONE_CHUNK), (2, TWO_CHUNKS)])
def test_shared_experts_and_other_chunks_compute_while_tokens_travel_and_to_the_same_bits(ranks, num_chunks, rest):
    for early, late in ranks.run(experts_cases.shared_early_and_late, [("deepseek_v3", num_chunks)] * 2):
        assert early.order == [*LEAVE * num_chunks, "shared", *rest] * early.num_layers
        assert late.order == [*LEAVE * num_chunks, *rest, "shared"] * early.num_layers
        # The backward pass mirrors it: what was sent arrives, and what arrived is sent.
        mirrored = [{"send": "arrive", "arrive": "send"}.get(each, each) for each in reversed(early.order)]
        assert early.backward_order == mirrored
        assert early.values.keys() == late.values.keys()
        assert all(torch.equal(value, late.values[name]) for name, value in early.values.items())


def test_shared_experts_that_come_first_are_computed_once(ranks):
    for early, late in ranks.run(experts_cases.shared_early_and_late, [("qwen2_moe", 1)] * 2):
        assert early.order == late.order == ["shared", *LEAVE, *ONE_CHUNK] * early.num_layers
