"""Names that megatron-core imports from Transformer Engine, whose versions do not share all of them.

megatron-core 0.16.1 sets a name that it does not find to None and computes without it, more slowly or not at all.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TORCH = "transformer_engine.pytorch"


class EngineName(NamedTuple):
    """A name of Transformer Engine.

    Args:
        path: `"module:name"`, where megatron-core imports it from.
        lost: The consequence for a model if it is missing, as a clause.
        moved: Path in versions of Transformer Engine that do not have it at `path`; `restore_names` hands it to
            megatron-core.
        field: Field of `megatron_kwargs` that does without it if it is false; empty if layers cannot be built or
            computed without it.
        is_optional: True if layers need it only if that field is set.
    """

    path: str
    lost: str
    moved: str = ""
    field: str = ""
    is_optional: bool = False

    def is_needed(self, given: Mapping[str, Any]) -> bool:
        """Return whether a model with these fields of `megatron_kwargs` needs it."""
        return bool(given.get(self.field)) if self.is_optional else given.get(self.field) is not False


def _several(module: str, names: str, lost: str, *, field: str = "", is_optional: bool = False) -> Iterator[EngineName]:
    for name in names.split():
        yield EngineName(f"{module}:{name}", lost, field=field, is_optional=is_optional)


NAMES = (
    *_several(_TORCH, "Linear LayerNormLinear GroupedLinear DotProductAttention RMSNorm", "layers cannot be built"),
    *_several(f"{_TORCH}.fp8", "FP8GlobalStateManager fp8_autocast", "layers cannot be built"),
    *_several(f"{_TORCH}.tensor", "QuantizedTensor", "megatron-core cannot be imported"),
    *_several(
        f"{_TORCH}.distributed",
        "CudaRNGStatesTracker activation_recompute_forward checkpoint get_all_rng_states",
        "layers cannot be recomputed",
    ),
    *_several(
        f"{_TORCH}.router",
        "fused_topk_with_score_function fused_compute_score_for_moe_aux_loss fused_moe_aux_loss",
        "megatron-core cannot be imported",
    ),
    *_several(_TORCH, "Fp8Padding Fp8Unpadding", "experts cannot multiply in 8 bits"),
    *_several(
        f"{_TORCH}.attention.rope",
        "apply_rotary_pos_emb",
        "each layer rotates row by row and waits for the lengths of rows twice in each pass",
        field="apply_rope_fusion",
    ),
    *_several(
        f"{_TORCH}.permutation",
        "moe_permute moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute",
        "tokens of experts are permuted by several kernels in place of one",
        field="moe_permute_fusion",
    ),
    *_several(
        f"{_TORCH}.ops", "SwiGLU", "the activation is megatron-core's compiled one", field="use_te_activation_func"
    ),
    *_several(
        _TORCH,
        "initialize_ub destroy_ub UserBufferQuantizationMode",
        "collectives of tensor-parallel ranks do not overlap with products",
        field="tp_comm_overlap",
        is_optional=True,
    ),
    EngineName(
        f"{_TORCH}.attention:_SplitAlongDim",
        "the gradients of queries, keys and values are copied into one tensor in each layer",
        moved=f"{_TORCH}.utils:SplitAlongDim",
    ),
    EngineName(
        f"{_TORCH}.module.base:get_workspace",
        "routers cast their operands to float32 and multiply without tensor cores, 2 to 3 % of a step of a mixture of "
        "experts",
        moved=f"{_TORCH}.cpp_extensions:general_gemm",
    ),
)
"""All names that a model of rl-megatron uses."""


def found(path: str) -> Any:
    """Return the object at `"module:name"`, or None if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return vars(importlib.import_module(module)).get(name)
    except ImportError:
        return None


def name_problems(given: Mapping[str, Any], names: Iterable[EngineName] = NAMES) -> Iterator[str]:
    """Yield the names that the installed Transformer Engine lacks, as text with their cost and the way around them.

    Args:
        given: Fields of `megatron_kwargs`, which choose the kernels that a model needs.
        names: Names to look for.
    """
    key = "megatron_cfg.transformer_engine"
    try:
        importlib.import_module(_TORCH)
    except Exception as error:  # noqa: BLE001  # its libraries are loaded, which fails in many ways
        yield (
            f"{key}: Transformer Engine is installed and cannot be imported: {type(error).__name__}: {error}. Install "
            f"rl-megatron[te] against the installed torch, or set {key}=false"
        )
        return
    missing: dict[tuple[str, str], list[str]] = {}
    for each in names:
        is_there = found(each.path) is not None or bool(each.moved and found(each.moved) is not None)
        if each.is_needed(given) and not is_there:
            missing.setdefault((each.lost, each.field), []).append(each.path.replace(":", "."))
    for (lost, field), paths in missing.items():
        remedy = f"set megatron_cfg.megatron_kwargs.{field}=false, " if field else ""
        yield (
            f"{key}: the installed Transformer Engine has no {', '.join(paths)}; without it {lost}. Install the "
            f"version that rl-megatron[te] pins, {remedy}or set {key}=false"
        )


def restore_names() -> None:
    """Give megatron-core the names that the installed Transformer Engine has elsewhere, where it put None."""
    extension: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    attention: Any = importlib.import_module("megatron.core.transformer.attention")
    routing: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    split = found(f"{_TORCH}.utils:SplitAlongDim")
    if split is not None and vars(attention).get("SplitAlongDim") is None:
        extension.SplitAlongDim = attention.SplitAlongDim = split.apply
    multiply = found(f"{_TORCH}.cpp_extensions:general_gemm")
    if multiply is None or "workspace" in inspect.signature(multiply).parameters:
        return

    # megatron-core's `te_general_gemm` for a Transformer Engine that manages the workspace of cuBLAS itself.
    def product(
        a: Tensor,
        b: Tensor,
        out_dtype: torch.dtype | None = None,
        layout: str = "TN",
        out: Tensor | None = None,
        bias: Tensor | None = None,
        grad: bool = False,
    ) -> Any:
        return multiply(a, b, out_dtype=out_dtype, layout=layout, out=out, bias=bias, grad=grad)

    extension.te_general_gemm = routing.te_general_gemm = product
