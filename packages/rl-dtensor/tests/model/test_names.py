"""Parameters of a model as its files hold them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.torch.files.file_names import FileNames
from rl_dtensor.selfcheck import SMALL, shrink


@pytest.mark.parametrize(
    ("family", "mixer", "widths"), [("kimi_linear", "self_attn", (1, 1, 1)), ("olmo_hybrid", "linear_attn", (1, 1, 2))]
)
def test_the_convolution_of_several_projections_is_one_of_each_in_files(family, mixer, widths):
    with torch.device("meta"):
        config = shrink(AutoConfig.for_model(family), SMALL)
        if "linear_value_head_dim" in config.to_dict():
            config.linear_value_head_dim = widths[2] * config.linear_key_head_dim
        hf = AutoModelForCausalLM.from_config(config)
    name = f"model.layers.0.{mixer}.conv1d.weight"
    parameter = hf.get_parameter(name)
    pieces = list(FileNames(hf).pieces(name, tuple(parameter.shape)))
    assert [piece.name for piece in pieces] == [name.replace("conv1d", f"{part}_conv1d") for part in "qkv"]
    unit = len(parameter) // sum(widths)
    assert [piece.shape[0] for piece in pieces] == [unit * width for width in widths]
    assert torch.cat([torch.zeros(len(parameter), 1, 4)[piece.region] for piece in pieces]).shape == parameter.shape
    assert pieces[2].region == (slice(len(parameter) - unit * widths[2], len(parameter)),)
