"""Optimizers and schedules that cannot train a model here are refused from the config, without torch."""

import inspect

import pytest
from pydantic import ValidationError

from rl_core.facts.optimizer_arguments import OPTIMIZERS, REQUIRED, SCHEDULES, UNSUPPORTED, UNSUPPORTED_SCHEDULES
from rl_core.model_config import ModelConfig


@pytest.mark.parametrize(("name", "mention"), [("LBFGS", "loss"), ("SparseAdam", "sparse")])
def test_an_optimizer_that_cannot_train_a_model_is_refused_with_the_reason(name, mention):
    with pytest.raises(ValidationError) as refused:
        ModelConfig.model_validate({"model_name": "m", "optimizer": {"name": f"torch.optim.{name}", "kwargs": {}}})
    (problem,) = refused.value.errors()[0]["ctx"]["error"].problems
    assert (problem.key, problem.got) == ("optimizer.name", f"torch.optim.{name}")
    assert mention in problem.reason
    assert "torch.optim.AdamW" in problem.remedy


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_others_are_accepted(name):
    ModelConfig.model_validate({"model_name": "m", "optimizer": {"name": name, "kwargs": {"lr": 1e-3}}})


def test_every_optimizer_of_torch_is_known():
    torch = pytest.importorskip("torch")
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    names = {f"torch.optim.{each.__name__}" for each in classes if issubclass(each, torch.optim.Optimizer)}
    assert names - {"torch.optim.Optimizer"} == OPTIMIZERS.keys() | UNSUPPORTED.keys()


def test_every_schedule_of_torch_is_known():
    torch = pytest.importorskip("torch")
    module = torch.optim.lr_scheduler
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    schedules = {f"{module.__name__}.{each.__name__}" for each in classes if issubclass(each, module.LRScheduler)}
    assert schedules - {f"{module.__name__}.LRScheduler", f"{module.__name__}._LRScheduler"} == (
        SCHEDULES.keys() | UNSUPPORTED_SCHEDULES.keys()
    )


@pytest.mark.parametrize(("name", "required"), sorted(REQUIRED.items()))
def test_arguments_without_a_default_are_those_of_torch(name, required):
    torch = pytest.importorskip("torch")
    parameters = inspect.signature(getattr(torch.optim.lr_scheduler, name.rpartition(".")[2])).parameters.values()
    assert tuple(each.name for each in parameters if each.default is each.empty)[1:] == required


SCHEDULE = "torch.optim.lr_scheduler"


def refused(**section):
    with pytest.raises(ValidationError) as found:
        ModelConfig.model_validate({"model_name": "m", **section})
    return [
        (".".join([*map(str, error["loc"]), *filter(None, [problem.key])]), problem)
        for error in found.value.errors()
        for problem in error["ctx"]["error"].problems
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("torch.optim.AdamX", "torch.optim.Adam"),
        ("torch.optim.adamw", "torch.optim.AdamW"),
        ("torch.optin.AdamW", "torch.optim.AdamW"),
        ("torch.optim.lr_scheduler.StepLR", "torch.optim"),
        ("torch.Tensor", "torch.optim"),
        ("AdamW", "torch.optim.AdamW"),
    ],
)
def test_a_class_that_is_not_an_optimizer_of_torch_is_refused_with_those_that_are(name, meant):
    ((key, problem),) = refused(optimizer={"name": name, "kwargs": {}})
    assert (key, problem.got) == ("optimizer.name", name)
    assert meant in problem.remedy


@pytest.mark.parametrize(
    ("entry", "key", "mention"),
    [
        ({"name": f"{SCHEDULE}.CosineAnealingLR"}, "scheduler[0].name", f"{SCHEDULE}.CosineAnnealingLR"),
        ({"name": "torch.optim.AdamW"}, "scheduler[0].name", SCHEDULE),
        ({"name": f"{SCHEDULE}.ReduceLROnPlateau"}, "scheduler[0].name", "follows a metric"),
        ({"name": f"{SCHEDULE}.SequentialLR"}, "scheduler[0].name", "entries of scheduler"),
        ({"name": f"{SCHEDULE}.LambdaLR"}, "scheduler[0].name", "Python function"),
        ({"name": f"{SCHEDULE}.CosineAnnealingLR"}, "scheduler[0].kwargs.T_max", "must be set"),
        ({"name": f"{SCHEDULE}.StepLR", "kwargs": {"gamma": 0.5}}, "scheduler[0].kwargs.step_size", "must be set"),
        ({"name": "LinearLR"}, "scheduler.0.name", f"{SCHEDULE}.LinearLR"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(entry, key, mention):
    ((found, problem),) = refused(scheduler=[entry])
    assert found == key
    assert mention in problem.message


@pytest.mark.parametrize(
    ("optimizer", "argument", "value", "remedy"),
    [
        ("AdamW", "lr", "0,001", "Write 0.001, with a point"),
        ("AdamW", "eps", -1, ""),
        ("AdamW", "betas", 0.9, ""),
        ("AdamW", "betas", [0.9, 0.99, 0.999], ""),
        ("AdamW", "betas", [0.9, 1.5], ""),
        ("Rprop", "etas", 0.5, ""),
        ("Adafactor", "eps", 1e-8, ""),
    ],
)
def test_a_value_that_an_optimizer_of_torch_refuses_is_refused_from_the_config(optimizer, argument, value, remedy):
    ((key, problem),) = refused(optimizer={"name": f"torch.optim.{optimizer}", "kwargs": {argument: value}})
    assert (key, problem.got, problem.remedy) == (f"optimizer.kwargs.{argument}", value, remedy)


def test_pairs_that_torch_takes_and_classes_of_other_packages_are_left_to_the_worker():
    for name, arguments in (
        ("torch.optim.Adafactor", {"eps": [None, 1e-3]}),
        ("torch.optim.Rprop", {"etas": [0.5, 1.2]}),
        ("bitsandbytes.optim.AdamW8bit", {"lr": 1e-3, "betas": 3}),
    ):
        ModelConfig.model_validate({"model_name": "m", "optimizer": {"name": name, "kwargs": arguments}})
    ModelConfig.model_validate({"model_name": "m", "scheduler": [{"name": "mine.schedules.Cosine"}]})
