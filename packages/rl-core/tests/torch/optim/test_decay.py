"""Parameters that get no weight decay."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from rl_core.facts.optimizer_arguments import OPTIMIZERS
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.torch.optim.optimizer import build_optimizer
from rl_core.torch.optim.parameters import OptimizedParameter, describe_parameters

FAMILIES = ("gpt2", "gpt_oss", "olmo2", "phi", "qwen2", "qwen3_next", "falcon_h1", "stablelm")
"""Norms with and without biases, of whole states and of heads, sinks, and layers with states."""


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_the_trainer_of_transformers(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=4))
    decayed = Trainer.get_decay_parameter_names(None, model)
    found = norms_and_biases(model)
    ours = {name for name, parameter in model.named_parameters() if parameter not in found}
    assert ours == set(decayed) & dict(model.named_parameters()).keys()


def test_a_norm_is_known_by_its_class_if_its_name_does_not_say_so():
    model = nn.ModuleDict({"scale": nn.RMSNorm(3), "layers": nn.ModuleList([nn.Linear(2, 2)])})
    assert norms_and_biases(model) == {model["scale"].weight, model["layers"][0].bias}


def norms_and_biases(model):
    return {parameter for parameter, found in describe_parameters([model]).items() if found.is_norm_or_bias}


def optimizer(name, **settings):
    return OptimizerConfig(name=f"torch.optim.{name}", kwargs={"lr": 0.1, **settings}, decay_norms_and_biases=False)


def test_a_group_without_any_is_there_on_every_rank():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    for undecayed in ({parameters[1]}, set(), set(parameters)):
        described = {each: OptimizedParameter(("x",), each in undecayed) for each in parameters}
        built = build_optimizer(optimizer("AdamW", weight_decay=0.5), parameters, described=described)
        assert [group["weight_decay"] for group in built.param_groups] == [0.5, 0.0]
        for parameter in parameters:
            parameter.grad = torch.zeros(2)
        before = [parameter.detach().clone() for parameter in parameters]
        built.step()
        for parameter, start in zip(parameters, before, strict=True):
            assert torch.equal(parameter, start) == (parameter in undecayed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_choice_is_refused_for_an_optimizer_without_weight_decay(name):
    config = OptimizerConfig(name=name, kwargs={"lr": 0.1}, decay_norms_and_biases=False)
    if "weight_decay" in OPTIMIZERS[name]:
        assert ModelConfig(model_name="m", optimizer=config)
        num_kinds = 2 if name == "torch.optim.Muon" else 1
        assert len(build_optimizer(config, [nn.Parameter(torch.ones(2))]).param_groups) == 2 * num_kinds
        return
    with pytest.raises(ValueError, match=r"decay_norms_and_biases.*has no effect with"):
        ModelConfig(model_name="m", optimizer=config)
    with pytest.raises(ValueError, match="decay_norms_and_biases=false has no effect"):
        build_optimizer(config, [nn.Parameter(torch.ones(2))])
