"""Names of Transformer Engine that megatron-core needs, on a pretended one."""

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import megatron.core
import pytest
import torch
from megatron.core.transformer import attention
from megatron.core.transformer.moe import moe_utils

from rl_megatron import engine_names, preflight
from rl_megatron.engine_names import NAMES, name_problems, restore_names

CORE = Path(megatron.core.__path__[0])
FILES = (
    "extensions/transformer_engine.py",
    "transformer/attention.py",
    "transformer/transformer_block.py",
    "fp8_utils.py",
    "tensor_parallel/random.py",
)
UNUSED = {
    "attention.apply_rotary_pos_emb": "of older versions",
    "attention.rope.apply_fused_qkv_rotary_pos_emb": "fused_single_qkv_rope is refused",
    "cpp_extensions.cast_to_fp8": "of older versions",
    "cpp_extensions.general_gemm": "imported with get_workspace, and looked for as where that moved",
    "cpu_offload": "offloading refuses by itself",
    "cpu_offload_v1": "offloading refuses by itself",
    "cpu_offload.get_cpu_offload_context": "offloading refuses by itself",
    "cross_entropy.parallel_cross_entropy": "losses are computed outside Megatron",
    "float8_tensor.Float8Tensor": "parameters in 8 bits are refused",
    "LayerNorm": "all models have RMSNorm",
    "tensor.float8_tensor.Float8Tensor": "parameters in 8 bits are refused",
    "tensor.mxfp8_tensor.MXFP8Tensor": "parameters in 8 bits are refused",
    "tensor.utils.cast_master_weights_to_fp8": "parameters in 8 bits are refused",
    "tensor.utils.post_all_gather_processing": "parameters in 8 bits are refused",
    "tensor.utils.replace_raw_data": "parameters in 8 bits are refused",
}
"""Names that megatron-core imports, and why no model of rl-megatron misses them."""


def imported_by(file):
    """The names of `transformer_engine.pytorch` that a file of megatron-core uses."""
    for node in ast.walk(ast.parse((CORE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_engine.pytorch"):
            yield from (f"{node.module}.{name.name}".removeprefix("transformer_engine.pytorch.") for name in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("te.pytorch", "te.pytorch.distributed"):
            yield from [ast.unparse(node).removeprefix("te.pytorch.")] * node.attr[0].isupper()


def test_every_name_that_megatron_imports_is_looked_for_or_not_used():
    imported = {name for file in FILES for name in imported_by(file)}
    assert len(imported) > 30
    looked_for = {each.path.replace(":", ".").removeprefix("transformer_engine.pytorch.") for each in NAMES}
    assert imported - looked_for == UNUSED.keys()
    # an attribute of a module that is imported whole, and functions that a training loop calls
    buffers = {"initialize_ub", "destroy_ub", "UserBufferQuantizationMode"}
    assert looked_for - imported == {"ops.SwiGLU", *buffers}


def general_gemm(a, b, out_dtype=None, layout="TN", out=None, bias=None, grad=False):
    found = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]().to(out_dtype)
    return (found if bias is None else found + bias,)


@pytest.fixture
def pretended(monkeypatch):
    """Modules with every name where the pinned version has it; returns a function that removes a name."""
    modules = {}

    def module(name):
        if name not in modules:
            modules[name] = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, modules[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(module(parent), child, modules[name])
        return modules[name]

    for each in NAMES:
        path = each.moved or each.path
        where, _, name = path.partition(":")
        setattr(module(where), name, SimpleNamespace(apply="split"))
        module(each.path.partition(":")[0])
    module("transformer_engine.pytorch.cpp_extensions").general_gemm = general_gemm

    def remove(path):
        where, _, name = path.partition(":")
        delattr(modules[f"transformer_engine.pytorch.{where}".rstrip(".")], name)

    return remove


def test_nothing_is_missing_in_the_pinned_version(pretended):
    assert list(name_problems({})) == []


@pytest.mark.parametrize(
    ("path", "mention", "field"),
    [
        ("attention.rope:apply_rotary_pos_emb", "row by row", "apply_rope_fusion"),
        ("permutation:moe_unpermute", "several kernels", "moe_permute_fusion"),
        ("utils:SplitAlongDim", "has no transformer_engine.pytorch.attention._SplitAlongDim; without it", None),
        ("cpp_extensions:general_gemm", "2 to 3 %", None),
        (":GroupedLinear", "transformer_engine.pytorch.GroupedLinear; without it layers cannot be built", None),
    ],
)
def test_a_missing_name_is_reported_with_what_it_costs(pretended, path, mention, field):
    pretended(path)
    (problem,) = name_problems({})
    assert mention in problem
    assert "set megatron_cfg.transformer_engine=false" in problem
    assert (f"set megatron_cfg.megatron_kwargs.{field}=false" in problem) == (field is not None)
    assert list(name_problems({field or "none": False})) == ([] if field else [problem])


def test_names_of_what_is_off_by_default_are_looked_for_if_it_is_on(pretended):
    pretended(":initialize_ub")
    assert list(name_problems({})) == list(name_problems({"tp_comm_overlap": False})) == []
    (problem,) = name_problems({"tp_comm_overlap": True})
    assert "has no transformer_engine.pytorch.initialize_ub; without it collectives" in problem


def test_a_version_that_cannot_be_imported_is_reported(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("transformer_engine"):
                raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    (problem,) = name_problems({})
    assert "cannot be imported: OSError: libcuda" in problem


@pytest.mark.parametrize(
    ("section", "is_checked"),
    [({}, True), ({"megatron_cfg": {"transformer_engine": False}}, False), ({"lora_cfg": {"enabled": True}}, False)],
)
def test_the_preflight_looks_if_layers_are_built_of_it(pretended, monkeypatch, section, is_checked):
    pretended(":Linear")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [problem for problem in preflight.check(section) if "pytorch.Linear" in problem] == (
        list(name_problems({})) if is_checked else []
    )


def test_names_that_moved_are_handed_to_megatron(pretended, monkeypatch):
    extension = ModuleType("megatron.core.extensions.transformer_engine")
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    monkeypatch.setattr(attention, "SplitAlongDim", None, raising=False)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    restore_names()
    assert attention.SplitAlongDim == extension.SplitAlongDim == "split"
    assert moe_utils.te_general_gemm is extension.te_general_gemm

    hidden = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for product in (moe_utils.te_general_gemm, None):
        monkeypatch.setattr(moe_utils, "te_general_gemm", product)
        logits = moe_utils.router_gating_linear(hidden, weight, None, torch.float32)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), (hidden, weight))))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert engine_names.found("transformer_engine.pytorch.module.base:get_workspace") is None


@pytest.mark.parametrize(
    ("recipe", "found", "remedy"),
    [
        ("tensorwise", (8, 0), "set megatron_cfg.fp8_cfg.enabled=false"),
        ("blockwise", (8, 9), "set it to delayed or tensorwise"),
        ("mxfp8", (9, 0), "set it to delayed or tensorwise or blockwise"),
        ("blockwise", (9, 0), ""),
        ("mxfp8", (10, 0), ""),
    ],
)
def test_a_recipe_that_a_gpu_does_not_run_is_refused(recipe, found, remedy):
    problem = preflight.capability_problem(recipe, found)
    assert problem.endswith(remedy)
    assert bool(problem) == bool(remedy)
