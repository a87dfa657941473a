"""Optimizers and schedules by dotted name, and what is wrong with one in words."""

import pytest
import torch

from rl_core.model_config import OptimizerConfig, SchedulerConfig
from rl_core.torch.optimizer import build_optimizer, build_schedule
from rl_dtensor.preflight import check

LINEAR = SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "total_iters": 3})
COSINE = SchedulerConfig(name="torch.optim.lr_scheduler.CosineAnnealingLR", kwargs={"T_max": 5})


def parameters():
    return [torch.nn.Parameter(torch.ones(3))]


def test_an_optimizer_of_torch_is_built():
    config = OptimizerConfig(name="torch.optim.RMSprop", kwargs={"lr": 0.5, "alpha": 0.8})
    optimizer = build_optimizer(config, parameters())
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert optimizer.defaults["alpha"] == 0.8


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.AdmaW", {}, "cannot be imported"),
        ("AdamW", {}, "cannot be imported"),
        ("torch.nn.Linear", {}, "is no torch Optimizer"),
        ("torch.optim.SGD", {"lr": -1.0}, "does not take"),
        ("torch.optim.SGD", {"learning_rate": 1.0}, "does not take"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_said(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), parameters())
    problems = check({"policy": {"optimizer": {"name": name, "kwargs": kwargs}}})
    assert len(problems) == 1
    assert message in problems[0]


def test_schedules_take_over_at_their_milestones():
    optimizer = build_optimizer(OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0}), parameters())
    schedule = build_schedule([LINEAR, COSINE, SchedulerConfig(milestones=[3])], optimizer)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.4, 0.7, 1.0, (1 + torch.tensor(torch.pi / 5).cos().item()) / 2])


def test_no_schedule_is_constant():
    assert build_schedule([], build_optimizer(OptimizerConfig(), parameters())) is None


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([LINEAR, COSINE], "2 schedules and 0 milestones"),
        ([LINEAR, SchedulerConfig(milestones=[3])], "1 schedules and 1 milestones"),
        ([LINEAR, COSINE, LINEAR, SchedulerConfig(milestones=[5, 3])], "must rise"),
        ([SchedulerConfig(name="torch.optim.lr_scheduler.StepLR")], "does not take"),
        ([SchedulerConfig(name="torch.optim.SGD")], "is no torch LRScheduler"),
    ],
)
def test_what_is_wrong_with_schedules_is_said(schedules, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(schedules, build_optimizer(OptimizerConfig(), parameters()))
    problems = check({"policy": {"scheduler": [schedule.model_dump() for schedule in schedules]}})
    assert len(problems) == 1
    assert message in problems[0]


def test_defaults_pass_the_preflight():
    assert check({"policy": {"model_name": "m"}}) == []
