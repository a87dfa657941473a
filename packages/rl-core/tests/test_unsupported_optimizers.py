"""Optimizers that cannot train a model here are refused from the config."""

import pytest
from pydantic import ValidationError

from rl_core.model_config import ModelConfig
from rl_core.optimizer_arguments import OPTIMIZERS, UNSUPPORTED


@pytest.mark.parametrize(
    ("name", "mention"), [("Muon", "matrices of hidden layers"), ("LBFGS", "loss"), ("SparseAdam", "sparse")]
)
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
