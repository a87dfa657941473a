"""Causal attention within each row, over rows that lie end to end or side by side and may be split over ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from rl_core.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_core.torch.training.flops import ROW_LAYERS
from rl_dtensor.config import AttentionBackend
from rl_dtensor.kernels import Attend, Softmax
from rl_dtensor.layout import Context, Layout
from rl_dtensor.parallel.collectives import exchange, gather

ROWS = "rl_rows"
"""Name under which `transformers` models find this attention."""

WITHOUT_DROPOUT: tuple[AttentionBackend, ...] = ("flash_attention_3", "flex")


class RowsUnknown(TypeError):
    """Attention was called without the layout of rows."""


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # not used: the rows' bounds replace it
    *,
    layout: Layout | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row, as an attention function of `transformers`.

    Padding on the right needs no mask: no token of the row comes after it.

    Args:
        query: `[batch, heads, tokens, head_dim]`; `key` and `value` may have fewer heads.
        layout: the rows, and which of their tokens this rank has.
        attend: what computes it once all keys that a query sees are here.
        sliding_window: tokens that each token sees, itself included; all before it if None.

    Returns:
        `[batch, tokens, heads, head_dim]`.

    Raises:
        RowsUnknown: if the model did not pass on the layout and the kernel that its forward pass was given.
    """
    if layout is None or attend is None:
        raise RowsUnknown(f"{type(module).__name__} calls attention without the layout of rows")
    context, softmax = layout.context, Softmax(scaling, dropout, sliding_window)
    if context is None:
        out = attend(query, key, value, layout.segments, softmax)
    elif context.method == "all_gather":
        places = layout.key_places
        key, value = (gather(part, 2, context.group).index_select(2, places) for part in (key, value))
        out = attend(query, key, value, layout.segments, softmax)
    else:
        key, value = (_repeated(part, context.size) for part in (key, value))
        query, key, value = (
            _to_heads(part, context).index_select(2, layout.key_places) for part in (query, key, value)
        )
        out = attend(query, key, value, layout.segments, softmax)
        out = _to_tokens(out.index_select(2, layout.rank_places), context)
    return out.transpose(1, 2).contiguous(), None


def _repeated(x: Tensor, size: int) -> Tensor:
    """Key or value heads as often as they must be for every rank to have one."""
    heads = x.shape[1]
    return x if heads % size == 0 else x.repeat_interleave(size // heads, 1)


def _to_heads(x: Tensor, context: Context) -> Tensor:
    """`[batch, heads, own tokens, head_dim]` as `[batch, heads / size, tokens in the order of ranks, head_dim]`."""
    parts = torch.stack(x.chunk(context.size, 1))  # [size, batch, heads / size, own, head_dim]
    ones = [1] * context.size
    return torch.cat(exchange(parts, ones, ones, context.group).unbind(0), 2)


def _to_tokens(x: Tensor, context: Context) -> Tensor:
    """The way back from `_to_heads`."""
    parts = torch.stack(x.chunk(context.size, 2))
    ones = [1] * context.size
    return torch.cat(exchange(parts, ones, ones, context.group).unbind(0), 1)


def body_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its head, which some families keep under another name than they declare."""
    if hf.base_model is not hf:
        return hf.base_model
    return next(child for child in hf.children() if isinstance(child, PreTrainedModel))


class _Told(Exception):
    """Rows have reached attention."""


def rows_problem(hf: PreTrainedModel) -> str:
    """Why rows cannot be packed or split with a model on `meta` that was built with this attention; empty if they can.

    They can if its forward pass takes the places of tokens and is seen to hand on to attention the layout of rows. A
    model that cannot be computed on `meta` as far as its first attention does not show that: models that carry state
    from token to token before it are among those.
    """
    if "position_ids" not in inspect.signature(body_of(hf).forward).parameters:
        return "its forward pass takes no position_ids"
    place = torch.arange(2, device="meta")[None]
    rows = Rows(place[0], {TOKENS: place[0]})
    layout = Layout(rows, place, place, place[0], None, bounds=((0, 2),), length=2, context=None)
    # with a mask the model does not derive rows from the positions, which is not possible on `meta`
    inputs = {"input_ids": place, "position_ids": place, "attention_mask": torch.ones_like(place)}
    try:
        body_of(hf)(**inputs, use_cache=False, layout=layout, attend=_tell)
    except _Told:
        return ""
    except RowsUnknown as error:
        return str(error)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # of the family's code, on `meta`
        return f"its forward pass fails without data before it reaches attention: {type(error).__name__}: {error}"
    return "its forward pass never calls this attention"


def _tell(*_: Any) -> Tensor:
    raise _Told


def attention_for(
    config: PreTrainedConfig,
    backend: AttentionBackend,
    *,
    packed: bool,
    split: bool,
    supports_sdpa: bool,
    rows_problem: str = "",
) -> str:
    """The attention implementation to ask `transformers` for.

    Args:
        packed: whether rows lie end to end.
        split: whether rows are split over ranks, by context or sequence parallelism.
        supports_sdpa: whether the model's attention is a plain softmax of products (`_supports_sdpa` of its class).
        rows_problem: why its attention cannot be told where rows start and end; empty if it can.

    Raises:
        ValueError: if rows of this model cannot be packed or split without one seeing another, or without changing
        its attention, or the backend cannot compute it.
    """
    settings = config.get_text_config().to_dict()
    dropout = settings.get("attention_dropout") or 0.0
    if dropout and backend in WITHOUT_DROPOUT:
        raise ValueError(
            f"dtensor_cfg.attention_backend={backend} has no dropout and the model's attention_dropout is "
            f"{dropout}; set hf_config_overrides.attention_dropout=0, or attention_backend=auto"
        )
    plain = supports_sdpa and settings.get("attn_logit_softcapping") is None
    foreign = sorted(set(settings.get("layer_types") or []) - ROW_LAYERS)
    if plain and not foreign and not rows_problem:
        return ROWS
    if foreign:
        why = f"layers of type {', '.join(foreign)}"
    elif plain:
        why = f"attention that cannot be told where rows start and end ({rows_problem})"
    else:
        why = "attention that is not a plain softmax of products"
    if packed or split:
        advice = "sequence_packing.enabled=false" if packed else "context_parallel_size=1 and sequence_parallel=false"
        raise ValueError(
            f"rows of a {config.model_type} model cannot be {'packed' if packed else 'split'}: it has {why}; "
            f"set {advice}"
        )
    own = "sdpa" if plain else "eager"
    if backend not in ("auto", "eager", own):
        raise ValueError(
            f"dtensor_cfg.attention_backend={backend} cannot run a {config.model_type} model: it has {why}; "
            f"set attention_backend={own}"
        )
    return own if backend == "auto" else backend


# the bounds of rows are numbers that change with every microbatch, which compiled code must not hold
AttentionInterface.register(ROWS, torch.compiler.disable(row_attention))
AttentionMaskInterface.register(ROWS, lambda *_, **__: None)
