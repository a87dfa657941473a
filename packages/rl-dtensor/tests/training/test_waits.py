"""The host does not wait for the device while it works through microbatches."""

import numpy as np
import pytest
from transformers import AutoConfig

from rl_core.data.batch import Batch
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.selfcheck import SGD
from rl_dtensor.selfcheck import CHECK, write_tiny

FEW, MANY = 1, 3


def batch_of(num_microbatches):
    """A batch of which each microbatch is a row of 17 tokens."""
    return Batch.concat([CHECK.batch(0).select(np.array([2]))] * num_microbatches)


@pytest.mark.parametrize("is_packed", [True, False])
def test_more_microbatches_are_no_more_waits(ranks, tmp_path, is_packed):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=SGD,
        train_micro_batch_size=1,
        logprob_batch_size=1,
        sequence_packing=SequencePackingConfig(enabled=is_packed, train_mb_tokens=17, logprob_mb_tokens=17),
    )
    with PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), 1) as model:
        model.train_step(batch_of(FEW), TokenLoss())
        for loss in (TokenLoss(), None):
            few, many = (ranks.run("waits_cases:waits", [(batch_of(num), loss)])[0] for num in (FEW, MANY))
            assert many - few == {}
            if loss is not None:
                # the gradient's norm, which decides whether to step, and the metrics
                assert sum(many.values()) <= 4, many
