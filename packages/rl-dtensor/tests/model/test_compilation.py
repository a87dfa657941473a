"""Parts of layers are compiled once, and compute what they did."""

from functools import partial
from itertools import product

import pytest
import torch
from test_formulas import tiny
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers import compilation
from rl_dtensor.model.layers.compilation import compile_layers
from rl_dtensor.model.layers.fusion import fuse_layers
from rl_dtensor.model.tiny import made_tiny, shrink
from rl_dtensor.model.whole import decoder_layers

LENGTHS = (7, 64, 33, 2, 128)


GRAPHS = "aot_eager_decomp_partition"
"""Traces, guards, decomposes and partitions as inductor does, and runs the graphs without its code."""


@pytest.fixture
def backend():
    """Runs what is traced as it is."""
    return "eager"


@pytest.fixture
def graphs(monkeypatch, backend):
    """Counts the graphs that are compiled."""
    counter = CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(compilation, "compiler_problem", lambda: "")
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def built(family, **fields):
    """The same tiny model at each call, with norms that are not ones."""
    config = shrink(AutoConfig.for_model(family, **fields))
    torch.manual_seed(0)
    with made_tiny(config.model_type):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def trained(model, length, num_rows=1):
    """Logits, and gradients of all parameters."""
    model.zero_grad()
    tokens = torch.arange(num_rows * length).view(num_rows, length) % 31 + 1
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.sin().mean().backward()
    return {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters()}}


FOUND = {
    "llama": {"norms": 4, "gates": 2, "rotations": 2, "residuals": 2},
    "qwen3": {"norms": 8, "gates": 2, "rotations": 2, "residuals": 2},
    "mixtral": {"norms": 4, "rotations": 2, "residuals": 2},
    "phi3": {"norms": 4, "gates": 2, "rotations": 2},
    "gemma2": {"norms": 8, "gates": 2, "rotations": 2},
    "cohere": {"norms": 2, "gates": 2, "rotations": 2},
    "gpt2": {"norms": 4, "activations": 2},
}
"""Parts of two layers."""

LEFT = {
    "llama": {},
    "qwen3": {},
    "mixtral": {},
    "phi3": {},
    "gemma2": {"gates": 2},
    "cohere": {"norms": 2, "rotations": 2},
    "gpt2": FOUND["gpt2"],
}
"""Parts that fused kernels leave of them."""


@pytest.mark.parametrize("family", FOUND)
def test_parts_are_found_by_what_they_are_and_those_of_kernels_left(graphs, family):
    model = tiny(family, attention=ROWS)
    assert +compile_layers(model, decoder_layers(model)) == FOUND[family]
    model = tiny(family, attention=ROWS)
    fuse_layers(model, decoder_layers(model))
    assert +compile_layers(model, decoder_layers(model)) == LEFT[family]
    assert graphs.frame_count == 0


@pytest.mark.parametrize(
    ("family", "backend"), partly_exhaustive(product(FOUND, ("eager", GRAPHS)), always=[("qwen3", "eager")])
)
def test_one_graph_serves_all_layers_and_lengths_and_computes_the_same(graphs, family):
    plain, compiled = built(family), built(family)
    compile_layers(compiled, decoder_layers(compiled))
    counts = []
    for length in LENGTHS:
        expected, found = trained(plain, length), trained(compiled, length)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1, counts
    # each kind of norm by its width, with a sum before it and without; a gate or activation; a rotation
    assert 0 < counts[0] <= 6


@exhaustive
def test_several_rows_and_a_single_token_have_graphs_of_their_own(graphs):
    plain, compiled = built("llama"), built("llama")
    compile_layers(compiled, decoder_layers(compiled))
    seen = []
    for num_rows, length in ((1, 7), (2, 5), (3, 9), (4, 2), (1, 1), (1, 64)):
        expected, found = trained(plain, length, num_rows), trained(compiled, length, num_rows)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        seen.append(graphs.frame_count)
    packed, rows, token = seen[0], seen[1], seen[4]
    assert seen == [packed, rows, rows, rows, token, token]
    # only rotations see the rows
    assert rows == packed + 1
    assert token <= rows + packed
