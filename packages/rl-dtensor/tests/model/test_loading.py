"""Values that no file holds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.torch.files.buffers import rebuild_buffers
from rl_dtensor.selfcheck import SMALL, shrink


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "falcon_h1",  # the model fills buffers of its layers' parts
        "gemma3n_text",  # how they are filled depends on the model inside the one with a head
    ],
)
def test_buffers_of_a_model_built_without_values_are_those_of_one_built_with_them(family):
    config = shrink(AutoConfig.for_model(family), SMALL)
    expected = dict(AutoModelForCausalLM.from_config(config).named_non_persistent_buffers())
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    hf.to_empty(device="cpu")
    rebuild_buffers(hf)
    found = dict(hf.named_non_persistent_buffers())
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)


def test_a_stage_that_lacks_what_the_model_fills_is_refused():
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(shrink(AutoConfig.for_model("falcon_h1"), SMALL))
    hf.to_empty(device="cpu")
    hf.model.layers[1].mamba = None
    with pytest.raises(ValueError, match="falcon_h1 models do not say how to fill their buffers"):
        rebuild_buffers(hf)
