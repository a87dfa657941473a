"""The costs of training real shapes stay within budgets.

A change that lowers a cost lowers its budget; one that raises a cost says why. `benchmarks/ledger.py` prints all
figures, and `benchmarks/results/ledger.md` explains them.
"""

from functools import cache

import numpy as np
import pytest

from rl_core.data.microbatch import plan_microbatches, shard
from rl_core.torch.training.flops import attention_shapes
from rl_dtensor.config import DTensorConfig
from rl_dtensor.ledger.attention import attention_costs
from rl_dtensor.ledger.head import head_costs
from rl_dtensor.ledger.layout import layout_costs
from rl_dtensor.ledger.pipeline import bubble
from rl_dtensor.ledger.shapes import config_of
from rl_dtensor.ledger.step import Workload, layer_costs

TOKENS = 8192
KB, MB, GB = 10**3, 10**6, 10**9

LAYERS = {
    # kernels forward and backward, KB of memory traffic per token outside of matrix products forward and backward
    "Qwen3-8B": (0, 0, 0, 0),
    "Qwen3-30B-A3B": (0, 0, 0, 0),
    "Llama-70B": (0, 0, 0, 0),
    "DeepSeek-V3": (0, 0, 0, 0),
}
HEADS = {
    # (entropy, chunk): MB per token outside of matrix products forward and backward, for Qwen3-8B
    (False, 1024): (0, 0),
    (True, 1024): (0, 0),
    (False, 4096): (0, 0),
}
ATTENTION_COPIES_KB = {"Qwen3-8B": 0, "Qwen3-30B-A3B": 0, "DeepSeek-V3": 0}
WAITS_PER_MICROBATCH = 0
SHARDING = {
    # microbatches: all-gathers and reduce-scatters of one layer and of the rest of the model, for Qwen3-30B-A3B
    1: (0, 0),
    2: (0, 0),
}
EXPERTS = {"all_to_all": 0, "waits": 0}


@cache
def layer(name, ranks=8, microbatches=1, **settings):
    alike = {"first_k_dense_replace": 0} if name == "DeepSeek-V3" else {}
    workload = Workload(TOKENS, num_microbatches=microbatches)
    return layer_costs(config_of(name, **alike), DTensorConfig(**settings), workload, num_ranks=ranks)
