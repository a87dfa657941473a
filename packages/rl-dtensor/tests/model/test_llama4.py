"""Llama 4's experts, called with the tokens that choose them, against its own code, which calls all with all."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.selfcheck.torch.tiny_model import SIZES
from rl_dtensor.model.layers.llama4 import patch_llama4
from rl_dtensor.model.layers.replay import intercept, routers_of, routing_shape


@pytest.mark.parametrize("num_chosen", [1, 2])
@pytest.mark.parametrize("are_given", [False, True])
def test_logits_and_gradients_are_those_of_its_own_code(num_chosen, are_given):
    fields = {"num_local_experts": 4, "num_experts_per_tok": num_chosen, "intermediate_size_mlp": 24}
    config = AutoConfig.for_model("llama4_text", **{**SIZES, **fields}, interleave_moe_layer_step=2)
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.device("meta"):
        patched = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    patch_llama4(patched)
    patched.to_empty(device="cpu")
    for name, buffer in own.named_buffers():
        patched.get_buffer(name).copy_(buffer)
    patched.load_state_dict(own.state_dict())
    tokens = torch.arange(3, 13).view(2, 5)
    given = torch.rand(10, 4).argsort(-1)[:, :num_chosen]
    outputs = []
    for model in (own, patched):
        if are_given:
            for _, router in routers_of(model):
                intercept(router, routing_shape(model), lambda own: given, "llama4_text")
        logits = model(tokens, use_cache=False).logits
        logits.sin().sum().backward()
        outputs.append(logits)
    torch.testing.assert_close(*outputs)
    for (name, one), other in zip(own.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
