"""Scores of groups of rows by reward models of several families, on several meshes, next to transformers row by row."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import PREFIX_GROUP
from rl_core.data.ragged import Ragged
from rl_core.model import SCORES, ModelSpec
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import SIZES
from rl_core.testing.exhaustive import exhaustive

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, **SLIDING},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"query_pre_attn_scalar": 8, **SLIDING},
    "qwen2": {},
    "qwen3_moe": EXPERTS,
    "phi3": {},
    "qwen3_next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
MESHES = {
    "one rank": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2+sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}
CASES = [
    ("qwen3", "fsdp2"),
    ("gemma2", "fsdp2"),
    ("llama", "tp2+sp"),
    pytest.param("qwen3_next", "fsdp2", marks=exhaustive),  # states of rows, which are computed for each
    pytest.param("qwen3", "cp2", marks=exhaustive),
    pytest.param("qwen3", "pp2", marks=exhaustive),
    *(pytest.param(family, "one rank", marks=exhaustive) for family in FAMILIES),
    *(pytest.param(family, "tp2", marks=exhaustive) for family in ("qwen3", "mistral", "gemma3_text")),
]


def write_classifier(folder, family):
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], "num_labels": 1})
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def make_groups():
    """Three groups of rows, two of them with a common beginning that is longer than any window."""
    rng, rows, groups = np.random.default_rng(0), [], []
    for group, prefix, rests in ((0, 24, (3, 9, 1, 6)), (1, 0, (5, 12)), (2, 17, (4, 4, 20))):
        # The padding token would be cut off a row by transformers.
        beginning = rng.integers(3, 101, prefix)
        rows += [np.concatenate([beginning, rng.integers(3, 101, rest)]) for rest in rests]
        groups += [group] * len(rests)
    return Batch({TOKENS: Ragged.from_rows(rows, dtype=np.int32), PREFIX_GROUP: np.array(groups)})


@torch.no_grad()
def scores_by_transformers(folder, batch):
    # Its other kernels leave out the cap of scores.
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = [torch.tensor(row.tolist())[None] for row in batch.ragged(TOKENS)]
    return np.array([model(row).logits.item() for row in rows])


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_scores_are_those_of_transformers_on_each_row_alone(ranks, tmp_path, family, mesh):
    folder, batch = write_classifier(tmp_path, family), make_groups()
    expected = scores_by_transformers(folder, batch)
    num_ranks, settings = MESHES[mesh]
    packing = SequencePackingConfig(logprob_mb_tokens=4096)
    config = ModelConfig(model_name=folder, precision="float32", sequence_packing=packing)
    spec = ModelSpec(role="reward_model", trains=False)
    with PooledModel(ranks, "dtensor_factories:build", config, spec, num_ranks, **settings) as model:
        found = model.infer(batch, [SCORES]).array("scores")
        shares = ranks.run("dtensor_factories:shares_prefix", [()] * num_ranks)
    assert set(shares) == {True}
    assert len(set(expected.round(3))) == len(expected)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
