"""More tensor-parallel ranks than key-value heads: ranks share a head, and train as one process does in float64."""

from typing import Any

import pytest
from layouts import SHARED_KEYS_LAYOUTS, write_family

from rl_core.errors import WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.plugins import MeshCase
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import exhaustive
from rl_megatron.selfcheck import CHECK

_, SEQUENCE = SHARED_KEYS_LAYOUTS["tp4+sp"]
TP2 = {"tensor_model_parallel_size": 2}
GATED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
CASES = {
    "sequence": ("qwen3", {"num_key_value_heads": 2}, 4, SEQUENCE),
    "biases": ("qwen2", {"num_key_value_heads": 1}, 2, TP2),
    "windows, rows over ranks": ("mistral", {"num_key_value_heads": 1}, 4, {**TP2, "context_parallel_size": 2}),
    "gates": ("qwen3_next", GATED, 4, SEQUENCE),
}


@pytest.mark.parametrize(
    ("case", "has_adapters"),
    [
        ("sequence", True),
        # adapters of attention with biases are those of attention without
        ("biases", False),
        pytest.param("biases", True, marks=exhaustive),
        ("windows, rows over ranks", False),
        pytest.param("gates", False, marks=exhaustive),
        # adapters of attention without gates are above, and all weights of attention with gates
        pytest.param("gates", True, marks=exhaustive),
    ],
)
def test_steps_and_weights_are_those_of_one_process(ranks, tmp_path, case, has_adapters):
    family, fields, num_ranks, settings = CASES[case]
    folder = write_family(tmp_path, family, num_hidden_layers=2, **fields)
    mesh = MeshCase(case, num_ranks, settings, is_packed=True, has_adapters=has_adapters)
    (found,) = CHECK.check_family(ranks, folder, [mesh])
    assert found.verdict == "exact", found


def test_ranks_that_cannot_share_key_value_heads_evenly_are_refused(ranks, tmp_path):
    folder = write_family(tmp_path, "qwen3", num_attention_heads=12, num_key_value_heads=4)
    config = ModelConfig(model_name=str(folder), precision="float32")
    with pytest.raises(WorkerError, match=r"tensor_model_parallel_size: got 6: .*num_key_value_heads \(4\)"):
        PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 6, tensor_model_parallel_size=6)
