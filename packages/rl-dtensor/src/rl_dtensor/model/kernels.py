"""Ways to compute causal attention of rows whose queries, keys and values are on this rank."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from rl_core.install_command import install_command
from rl_dtensor.config import AttentionBackend
from rl_dtensor.model.layout import Segments, taken
from rl_dtensor.model.settings import MAX_FLASH_DIM, without_sinks, without_softcap

WITH_DROPOUT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels with dropout, for flash attention that has none."""

HALF = (torch.bfloat16, torch.float16)
MIN_FLEX_DIM = 16
"""Smallest heads that compiled flex attention takes."""
MAX_VARIANTS = 64
"""Maximum number of variants of a compiled function or part of a layer: kinds of layers and of scores, dtypes, one or
several rows, with and without gradients."""
logger = logging.getLogger(__name__)

OF_GENERATION = {9: ("FA3", 256), 10: ("FA4", 128)}
"""Major compute capability to torch's name of its implementation, and the largest heads that it takes."""


@dataclass(frozen=True)
class Softmax:
    """Conversion of the scores of an attention layer into weights.

    Args:
        scaling: Scaling of the products; `head_dim ** -0.5` if None.
        dropout: Share of the weights that are dropped.
        window: Tokens that each token sees, itself included; all before it if None.
        softcap: Bounds the scores: `softcap * tanh(score / softcap)`; not bounded if None.
        sinks: `[heads]`, a score per query head that takes part in the softmax and has no value; none if None.
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def flash_window(self) -> tuple[int, int]:
        """Numbers of tokens seen before and after each, as flash attention counts them."""
        return (-1 if self.window is None else self.window - 1, 0)


Attend = Callable[[Tensor, Tensor, Tensor, Segments, Softmax], Tensor]
"""From `[batch, heads, tokens, head_dim]`, with fewer heads for keys and values if they are grouped, to the same of the
queries. The segments cover the queries in order; the last query of each is at its last key."""

_Row = Callable[[Tensor, Tensor, Tensor, Softmax, Tensor | None], Tensor]
"""Attention of one segment. The last argument, bool `[batch, 1, queries, keys]`, marks the keys that each query sees;
None for the keys up to its own."""


def kernel_of(backend: AttentionBackend) -> Attend:
    """Return the attention of a backend, which raises a ValueError if it cannot compute a layer's softmax.

    Raises:
        ValueError: If its package is not installed.
    """
    if backend == "flash_attention_2":
        install = install_command("rl-dtensor[flash]")
        remedy = f"on GPUs set cluster.worker_envs=isolated, whose environments have it, or install it here ({install})"
        attend = _flash("flash_attn", remedy, takes_dropout=True)
    elif backend == "flash_attention_3":
        remedy = (
            "no package has it: build it from hopper/ of the flash-attention repository in the environment that this "
            "run is started from, with cluster.worker_envs=shared"
        )
        attend = _flash("flash_attn_interface", remedy)
    else:
        attend = _KERNELS[backend]

    def checked(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        check_softmax(backend, softmax)
        return attend(query, key, value, segments, softmax)

    return checked


def check_softmax(backend: AttentionBackend, softmax: Softmax) -> None:
    """Refuse a layer's softmax that a backend cannot compute.

    Raises:
        ValueError: Naming what it lacks.
    """
    if softmax.sinks is not None and (problem := without_sinks(backend)):
        raise ValueError(f"{problem.key}: {problem.message}")
    if softmax.softcap is not None and (problem := without_softcap(backend)):
        raise ValueError(f"{problem.key}: {problem.message}")


def _by_row(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax, *, attend_row: _Row
) -> Tensor:
    """Compute one segment after another, without the work between rows that a block-diagonal mask would cost.

    Tensors are split rather than sliced: the gradient of each slice would be as large as the whole.
    """
    key, value = _keys_of(segments, key, value)
    num_queries, num_keys = segments.lengths
    parts = zip(query.split(num_queries, 2), key.split(num_keys, 2), value.split(num_keys, 2), strict=True)
    masks: Sequence[Tensor | None] = [None] * len(num_queries)
    masks = masks if segments.blocks is None else segments.block_masks(softmax.window)
    return torch.cat([attend_row(*part, softmax, mask) for part, mask in zip(parts, masks, strict=True)], dim=2)


def _keys_of(segments: Segments, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of all segments, one after another."""
    if segments.keys is None:
        return key, value
    if segments.tree is None:
        return key.index_select(2, segments.keys), value.index_select(2, segments.keys)
    return taken(key, 2, segments.keys), taken(value, 2, segments.keys)


def _sdpa_row(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, seen: Tensor | None) -> Tensor:
    """Attend by torch's scaled dot-product attention.

    On GPUs only the kernel for causal attention of equal heads takes grouped ones. Every other fast kernel needs as
    many heads of keys and values, and torch makes all scores if it does not get them.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_short = softmax.window is None or num_keys <= softmax.window
    is_plain = seen is None and num_queries == num_keys and is_short
    if seen is None and not is_plain:
        seen = _seen(num_queries, num_keys, softmax.window, query.device)
    has_dropout = softmax.dropout > 0.0 and current_flash_attention_impl() is not None
    if has_dropout or not (is_plain and query.shape[-1] == value.shape[-1] <= MAX_FLASH_DIM):
        key, value = _for_each_head(query, key, value)
    with sdpa_kernel(WITH_DROPOUT) if has_dropout else nullcontext():
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen,
            dropout_p=softmax.dropout,
            is_causal=is_plain,
            scale=softmax.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for each query head that shares them."""
    repeats = query.shape[1] // key.shape[1]
    return (key, value) if repeats == 1 else (key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))


def _eager_row(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, seen: Tensor | None) -> Tensor:
    """Attend by matrix products and a softmax, in float32 at least."""
    key, value = _for_each_head(query, key, value)
    if seen is None:
        seen = _seen(query.shape[2], key.shape[2], softmax.window, query.device)
    scores = query @ key.transpose(2, 3) * _scale(query, softmax)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softmax.softcap is not None:
        scores = (scores / softmax.softcap).tanh() * softmax.softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return F.dropout(weights.to(value.dtype), softmax.dropout) @ value


def _seen(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the keys that each query sees, bool `[queries, keys]`."""
    place = torch.arange(num_keys, device=device)
    distance = place[num_keys - num_queries :, None] - place
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def varlen(attend: Callable[..., Any] = varlen_attn) -> Attend:
    """Return the attention of all segments in one call of torch; without dropout, in half precision on CUDA.

    Args:
        attend: Computes it, with the signature of `torch.nn.attention.varlen.varlen_attn`.
    """

    def attend_all(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        assert len(query) == 1
        key, value = _keys_of(segments, key, value)
        flat = (part.squeeze(0).transpose(0, 1) for part in _of_one_size(query, key, value))
        out: Tensor = attend(
            *flat,
            segments.query_ends,
            segments.key_ends,
            *segments.longest,
            scale=_scale(query, softmax),
            window_size=softmax.flash_window,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(0, 1)[None, ..., : value.shape[-1]]

    return attend_all


def _scale(query: Tensor, softmax: Softmax) -> float:
    """Return the scaling of the products, by default by the size of heads before they are padded."""
    return query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling


def _of_one_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad `[..., head_dim]` with zeros to the one size of heads that flash attention takes, a multiple of 8.

    Zeros add nothing to the products, and the caller cuts off the end of the results. Tensors of that size are returned
    as they are: padding by nothing would copy them.
    """
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    query, key, value = (
        part if part.shape[-1] == size else F.pad(part, (0, size - part.shape[-1])) for part in (query, key, value)
    )
    return query, key, value


def _flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
    """Attend by one kernel that skips the blocks between rows; a block mask is made once per microbatch and window.

    Keys that rows share are read where they are, while other kernels take a copy of them for each row.

    A sink adds its share to the sum that the softmax divides by, whose logarithm the kernel returns and differentiates.
    """
    attend = compiled(flex_attention) if query.is_cuda else flex_attention
    out, aux = attend(
        query,
        key,
        value,
        score_mod=None if softmax.softcap is None else _capped(softmax.softcap),
        block_mask=_block_mask(segments, softmax.window, key.shape[2], len(query)),
        scale=softmax.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=softmax.sinks is not None),
    )
    if softmax.sinks is None:
        return out
    share = (aux.lse - softmax.sinks[:, None]).sigmoid()
    return (out * share[..., None]).to(out.dtype)


@cache
def _capped(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function for a cap, which is kept: a new function would be compiled anew."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (score / softcap).tanh() * softcap

    return capped


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does not make all scores, or the whole mask, as the uncompiled one does.

    It is compiled for each kind of scores, with gradients and without: for the first number of tokens, for others, and
    for another number of blocks. By default torch compiles 8 variants, and computes all scores from then on.
    """
    to_graph: Any = torch.compile  # It is declared without `recompile_limit`.
    return cast("Callable[..., Any]", to_graph(function, recompile_limit=MAX_VARIANTS))


@lru_cache(maxsize=8)
def _block_mask(segments: Segments, window: int | None, num_keys: int, num_rows: int) -> Any:
    make = compiled(create_block_mask) if segments.device.type == "cuda" else create_block_mask
    if segments.tree is not None:
        own, start, positions, ends = segments.tree_mask

        def sees_branch(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = own[query]
            seen = (key <= place) & (place < ends[key]) & (positions[key] >= start[query])
            return seen if window is None else seen & (positions[key] > positions[place] - window)

        return make(sees_branch, None, None, len(own), num_keys, segments.device)
    first, last = segments.seen_keys
    blocks = segments.blocks

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= first[query]) & (key <= last[query])
        return seen if window is None else seen & (key > last[query] - window)

    def sees_images(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert blocks is not None
        own = blocks[batch, last[query]]
        seen = sees(batch, head, query, key) | ((own == blocks[batch, key]) & (own >= 0))
        return seen if window is None else seen & (key > last[query] - window)

    rule, rows = (sees, None) if blocks is None else (sees_images, num_rows)
    return make(rule, rows, None, len(first), num_keys, segments.device)


def _flash(package: str, remedy: str, *, takes_dropout: bool = False) -> Attend:
    """Return the flash attention of a package: one call for packed rows, one for each segment of padded rows."""
    try:
        functions = importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"dtensor_cfg.attention_backend needs {package}, which cannot be imported ({error}); {remedy}, "
            "or set attention_backend=auto"
        ) from error

    def options(query: Tensor, softmax: Softmax) -> dict[str, Any]:
        dropout = {"dropout_p": softmax.dropout} if takes_dropout else {}
        return {
            "softmax_scale": _scale(query, softmax),
            "causal": True,
            "window_size": softmax.flash_window,
            "softcap": softmax.softcap or 0.0,
            **dropout,
        }

    def first(returned: Any) -> Tensor:
        # Some versions also return the logarithms of the softmax's sums.
        return returned[0] if isinstance(returned, tuple) else returned

    def attend_row(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, seen: Tensor | None) -> Tensor:
        assert seen is None, "flash attention takes no mask"
        parts = (part.transpose(1, 2) for part in _of_one_size(query, key, value))
        out = first(functions.flash_attn_func(*parts, **options(query, softmax)))
        return out.transpose(1, 2)[..., : value.shape[-1]]

    def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        if len(query) > 1:
            return _by_row(query, key, value, segments, softmax, attend_row=attend_row)
        key, value = _keys_of(segments, key, value)
        flat = (part.squeeze(0).transpose(0, 1) for part in _of_one_size(query, key, value))
        ends = (segments.query_ends, segments.key_ends)
        out = first(functions.flash_attn_varlen_func(*flat, *ends, *segments.longest, **options(query, softmax)))
        return out.transpose(0, 1)[None, ..., : value.shape[-1]]

    return attend


def _auto(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
    """Attend on GPUs by torch's flash attention, or by flex for other scores and shared keys, if these can run; else
    row by row."""
    on_gpu = query.is_cuda and softmax.dropout == 0.0
    is_plain = softmax.softcap is None and softmax.sinks is None
    takes_flex = on_gpu and min(query.shape[-1], value.shape[-1]) >= MIN_FLEX_DIM
    if takes_flex and (not is_plain or segments.blocks is not None or segments.tree is not None):
        return _flex(query, key, value, segments, softmax)
    if not is_plain or segments.blocks is not None:
        row = _sdpa_row if is_plain else _eager_row
        return _by_row(query, key, value, segments, softmax, attend_row=row)
    if on_gpu and query.dtype in HALF and len(query) == 1 and max(query.shape[-1], value.shape[-1]) <= MAX_FLASH_DIM:
        return _varlen(query, key, value, segments, softmax)
    return _by_row(query, key, value, segments, softmax, attend_row=_sdpa_row)


_varlen = varlen()

_KERNELS: Mapping[AttentionBackend, Attend] = {
    "auto": _auto,
    "sdpa": partial(_by_row, attend_row=_sdpa_row),
    "eager": partial(_by_row, attend_row=_eager_row),
    "flex": _flex,
}


def activate_flash_attention(largest_head: int) -> str | None:
    """Make torch's flash attention the one of this GPU's generation, if its package is installed.

    FlashAttention 3 (module `flash_attn_interface`) is for Hopper, FlashAttention 4 (`flash_attn.cute`) for Blackwell;
    without them torch's own runs, which is FlashAttention 2. It stays so for the process.

    Args:
        largest_head: Entries of the model's largest query, key or value head; 0 if they are not known.

    Returns:
        Name of the implementation that runs; None for torch's own.
    """
    if not torch.cuda.is_available():
        return None
    name, limit = OF_GENERATION.get(torch.cuda.get_device_capability()[0], ("", 0))
    active: str | None = current_flash_attention_impl()
    if not name or not 0 < largest_head <= limit or active == name:
        return active
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:  # It is not installed, or its package is another build.
        logger.info("attention_backend=auto runs torch's own flash attention; %s is not available: %s", name, error)
        return None
    logger.info("attention_backend=auto runs %s", name)
    return name
