"""Workers for the suites, built in the processes of a rank pool."""

import numpy as np

from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.testing.pooled_model import HELD
from rl_core.testing.rank_pool import Rank
from rl_megatron.config import MegatronConfig
from rl_megatron.worker import MegatronWorker


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: object) -> MegatronWorker:
    return MegatronWorker(config, MegatronConfig(**settings), spec, rendezvous)


def kept_tensors(rank: Rank) -> dict[str, np.ndarray]:
    """What steps change, as a rank holds it, by Megatron's name."""
    kept = rank.held[HELD]._weights.kept
    return {name: tensor.detach().float().numpy().copy() for name, tensor in kept.items()}


def forget_engine(rank: Rank) -> None:
    """Leave Megatron's functions for experts as they are imported where Transformer Engine is not installed."""
    from megatron.core.transformer.moe import moe_utils

    assert not moe_utils.HAVE_TE
    vars(moe_utils).pop("te_general_gemm", None)
