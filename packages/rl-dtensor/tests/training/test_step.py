"""Training steps whose gradient is not finite."""

import numpy as np
import pytest
from transformers import AutoConfig

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import partly_exhaustive
from rl_dtensor.selfcheck import CHECK, write_tiny

ADAMW = OptimizerConfig(kwargs={"lr": 1e-2})
PIPELINE = {"pipeline_parallel_size": 2}
HALVING = [SchedulerConfig(name="torch.optim.lr_scheduler.StepLR", kwargs={"step_size": 1, "gamma": 0.5})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(AutoConfig.for_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


def poisoned(seed):
    """A batch in which one row, so one rank, has an infinite weight."""
    batch = CHECK.batch(seed)
    weights = batch.ragged("weights")
    values = weights.values.copy()
    values[:2] = np.inf
    mask = batch.ragged("loss_mask")
    return batch.with_columns({"weights": weights.like(values), "loss_mask": mask.like(np.ones_like(mask.values))})


def open_model(ranks, folder, **settings):
    config = ModelConfig(
        model_name=str(folder), precision="float32", optimizer=ADAMW, scheduler=HALVING, max_skipped_steps=1
    )
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), 2, **settings)


@pytest.mark.parametrize("mesh", partly_exhaustive([{}, PIPELINE], always=[PIPELINE]), ids=str)
def test_a_gradient_that_is_not_finite_skips_the_optimizer_and_not_the_schedule(ranks, folder, mesh):
    with open_model(ranks, folder, **mesh) as model:
        before = model.infer(CHECK.batch(0), [LOGPROBS]).ragged("logprobs")
        metrics = model.train_step(poisoned(1), TokenLoss())
        assert metrics["skipped_steps"] == 1
        assert not np.isfinite(metrics["grad_norm"])
        assert model.infer(CHECK.batch(0), [LOGPROBS]).ragged("logprobs").equals(before)
        after = model.train_step(CHECK.batch(2), TokenLoss())
        assert after["skipped_steps"] == 0
        assert after["lr"] == pytest.approx(0.5e-2)
    with open_model(ranks, folder, **mesh) as model:
        assert model.train_step(CHECK.batch(2), TokenLoss())["grad_norm"] == after["grad_norm"]


def test_too_many_skipped_steps_in_a_row_end_the_run(ranks, folder):
    with open_model(ranks, folder) as model:
        for batch in (poisoned(0), CHECK.batch(1), poisoned(2)):
            model.train_step(batch, TokenLoss())
        with pytest.raises(WorkerError, match=r"2 training steps in a row.*max_skipped_steps=1"):
            model.train_step(poisoned(3), TokenLoss())
