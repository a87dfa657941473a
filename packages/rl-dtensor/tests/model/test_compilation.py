"""Layers are compiled in two parts, once for all of them and all numbers of tokens, and compute the same."""

import logging
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import MethodType

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.data.batch import TOKENS
from rl_core.model_config import LoraConfig
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.torch.loss import Rows
from rl_core.torch.training.recompute import RecomputePlan
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.model.layers import compilation
from rl_dtensor.model.layers.compilation import compile_layers
from rl_dtensor.model.layers.lora import add_adapters
from rl_dtensor.model.layers.recompute import checkpoint_activations
from rl_dtensor.model.layout import Alignment, lay_out
from rl_dtensor.model.tiny import made_tiny, shrink
from rl_dtensor.model.whole import decoder_layers

LENGTHS = ([3, 4], [10, 20, 34], [33], [1, 1])
"""Rows of some microbatches."""

GRAPHS = "aot_eager_decomp_partition"
"""Traces, guards, decomposes and partitions as inductor does, and runs the graphs without its code."""

PLANS = {"none": RecomputePlan(), "selective": RecomputePlan(0, 2), "full": RecomputePlan(2, 0)}


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


def built(family, *, adapted=False):
    """Return the same tiny model at each call, with norms that are not ones, and its layers."""
    config = shrink(AutoConfig.for_model(family))
    torch.manual_seed(0)
    with made_tiny(config.model_type):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ROWS)
    if adapted:
        add_adapters(model, LoraConfig(enabled=True, dim=2, alpha=4))
    for name, parameter in model.named_parameters():
        if "norm" in name or "lora" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train(), decoder_layers(model)


def trained(model, lengths, *, is_packed=True, backward=nullcontext):
    """Return hidden states of rows, and gradients of all parameters; the backward pass runs in a context."""
    model.zero_grad()
    tokens = torch.arange(sum(lengths)) % 31 + 1
    rows = Rows(torch.tensor([0, *lengths]).cumsum(0), {TOKENS: tokens})
    layout = lay_out(rows, Alignment(), is_packed=is_packed)
    options = {"layout": layout, "attend": kernel_of("auto"), "use_cache": False}
    out = model.model(input_ids=layout.input_ids, position_ids=layout.position_ids, **options).last_hidden_state
    if torch.is_grad_enabled():
        with backward():
            out.sin().mean().backward()
    return {"out": out.detach(), **{name: each.grad for name, each in model.named_parameters()}}


def assert_same(found, expected):
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


CASES = [
    (family, backend, plan, adapted)
    for family, adapted in product(("llama", "qwen3", "qwen3_moe", "phi3", "cohere"), (False, True))
    for backend, plan in (("eager", "none"), (GRAPHS, "none"), (GRAPHS, "selective"), (GRAPHS, "full"))
]


@pytest.mark.parametrize(
    ("family", "backend", "plan", "adapted"),
    partly_exhaustive(CASES, always=[("qwen3", "eager", "none", True), ("qwen3_moe", GRAPHS, "selective", False)]),
)
def test_two_graphs_serve_all_layers_and_lengths_and_compute_the_same(graphs, family, plan, adapted):
    (plain, _), (compiled, layers) = built(family, adapted=adapted), built(family, adapted=adapted)
    assert compile_layers(compiled, layers) == 2
    checkpoint_activations(compiled, layers, PLANS[plan])
    # The first layer needs no gradient by its input if the embedding is frozen.
    num_trained = 4 if adapted else 2
    for lengths in LENGTHS:
        assert_same(trained(compiled, lengths), trained(plain, lengths))
        assert graphs.frame_count == num_trained, lengths
    with torch.no_grad():
        torch.testing.assert_close(trained(compiled, [5, 6])["out"], trained(plain, [5, 6])["out"])
    assert graphs.frame_count == num_trained + 2


@pytest.mark.parametrize("backend", partly_exhaustive(["eager"], always=[]))
def test_padded_rows_and_a_single_token_have_graphs_of_their_own(graphs):
    (plain, _), (compiled, layers) = built("qwen3"), built("qwen3")
    compile_layers(compiled, layers)
    seen = []
    for lengths in ([7], [5, 3], [9, 2, 4], [1], [64]):
        assert_same(trained(compiled, lengths, is_packed=False), trained(plain, lengths, is_packed=False))
        seen.append(graphs.frame_count)
    assert seen == [2, 4, 4, 6, 6]


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", [GRAPHS])
def test_selective_recomputation_keeps_less_and_computes_no_product_again(graphs):
    products, kept = {}, {}
    for plan in PLANS:
        model, layers = built("qwen3")
        compile_layers(model, layers)
        checkpoint_activations(model, layers, PLANS[plan])
        trained(model, [40])
        counter = _Products()
        if plan != "full":  # Layers are recomputed as a whole, and nothing is compiled within a mode.
            trained(model, [40], backward=lambda counter=counter: counter)
        parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
        held = {}

        def keep(tensor, held=held, parameters=parameters):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trained(model, [40])
        products[plan], kept[plan] = counter.count, sum(held.values())
    assert products["selective"] == products["none"] > 0
    assert kept["full"] < kept["selective"] < kept["none"]


def test_a_layer_that_cannot_be_compiled_computes_by_its_own_code(graphs, caplog):
    (plain, _), (compiled, layers) = built("llama"), built("llama")

    def broken(self, x):
        torch._dynamo.graph_break()
        return type(self).forward(self, x)

    for layer in layers:
        layer.mlp.forward = MethodType(broken, layer.mlp)
    compile_layers(compiled, layers)
    with caplog.at_level(logging.INFO):
        assert_same(trained(compiled, [3, 4]), trained(plain, [3, 4]))
        assert_same(trained(compiled, [5]), trained(plain, [5]))
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([each for each in warnings if "LlamaDecoderLayer is not compiled" in each]) == 1
    assert "compiling LlamaDecoderLayer up to attention, for training" in caplog.text
