"""Causal attention within each row, over rows that lie end to end or side by side and may be split over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import TransformersKwargs

from rl_core.data.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_core.torch.training.flops import CHUNKED, RECURRENT_LAYERS, ROW_LAYERS, setting
from rl_dtensor.config import AttentionBackend
from rl_dtensor.model.kernels import Attend, Softmax, check_softmax
from rl_dtensor.model.layout import Context, Layout, Segments
from rl_dtensor.parallel.body import body_of
from rl_dtensor.parallel.collectives import exchange, gather
from rl_dtensor.parallel.experts import expert_modules

ROWS = "rl_rows"
"""Name under which `transformers` models find this attention."""

INERT = frozenset({"use_cache", *TransformersKwargs.__annotations__})
"""Keyword arguments that models hand on to every attention function, and that do not change what it computes."""

MODEL_ERRORS = (NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code on tensors without data."""

WITHOUT_DROPOUT: tuple[AttentionBackend, ...] = ("flash_attention_3", "flex")


QueryScale = Callable[[Tensor], Tensor]
"""From the places of tokens in their rows, int64 `[batch, tokens]`, to float32 factors of their queries."""


class RowsUnknown(ValueError):
    """Attention was called without the layout of rows, or with something that it does not compute with."""


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    chunk_size: int | None = None,
    query_scale: QueryScale | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row, as an attention function of `transformers`.

    Padding on the right needs no mask: no token of the row comes after it.

    Args:
        module: Attention layer that calls the function; it must be causal.
        query: `[batch, heads, tokens, head_dim]`.
        key: Same layout as `query`; may have fewer heads.
        value: Same layout as `key`.
        attention_mask: None; the rows' bounds replace it.
        layout: The rows, and which of their tokens this rank has.
        attend: Kernel that computes attention once all keys that a query sees are here.
        scaling: Scaling of the products; `head_dim ** -0.5` if None.
        dropout: Share of the attention weights that is dropped.
        sliding_window: Tokens that each token sees, itself included; all before it if None.
        softcap: Bounds the scores; see `Softmax`.
        s_aux: Sinks, `[heads]`; see `Softmax`.
        chunk_size: Tokens of each chunk of a row, outside of which no token sees any; the whole row if None.
        query_scale: Factors of the queries; 1 if None.
        **others: Other arguments that the model passes; all that are not None must be in `INERT`.

    Returns:
        `[batch, tokens, heads, head_dim]`.

    Raises:
        RowsUnknown: If the model did not pass on the layout and the kernel that its forward pass was given, or passes
            on more than is computed with here.
    """
    if layout is None or attend is None:
        raise RowsUnknown(f"{type(module).__name__} calls attention without the layout of rows")
    foreign = sorted(name for name, value in others.items() if value is not None and name not in INERT)
    if attention_mask is not None:
        foreign.append("a mask of its own")
    if not getattr(module, "is_causal", True):
        foreign.append("is_causal=False")
    if foreign:
        raise RowsUnknown(f"{type(module).__name__} calls attention with {', '.join(foreign)}")
    if query_scale is not None:
        query = (query * query_scale(layout.position_ids)[:, None, :, None]).to(query.dtype)
    context, softmax = layout.context, Softmax(scaling, dropout, sliding_window, softcap, s_aux)
    segments = layout.segments if chunk_size is None else layout.segments.chunked(chunk_size)
    if context is None:
        out = attend(query, key, value, segments, softmax)
    elif context.method == "all_gather":
        places = layout.key_places
        key, value = (gather(part, 2, context.group).index_select(2, places) for part in (key, value))
        out = attend(query, key, value, segments, softmax)
    else:
        key, value = (_repeated(part, context.size) for part in (key, value))
        query, key, value = (
            _to_heads(part, context).index_select(2, layout.key_places) for part in (query, key, value)
        )
        if s_aux is not None:
            softmax = replace(softmax, sinks=s_aux.chunk(context.size)[context.rank])
        out = attend(query, key, value, segments, softmax)
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


def tell_chunks(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Make layers of chunked attention report the chunk length; their code has it only in a mask, which rows replace.

    Args:
        hf: Model, whose config has the kind of each layer and the chunk length.
        layers: Repeated layers of the model, in order.

    Raises:
        RowsUnknown: If the config does not say how long they are.
    """
    config = hf.config.get_text_config()
    kinds = setting(config, "layer_types") or []
    chunked = [layer for layer, kind in zip(layers, kinds, strict=False) if kind == CHUNKED]
    size = setting(config, "attention_chunk_size")
    if chunked and size is None:
        raise RowsUnknown("its config has no attention_chunk_size")

    def tell(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "chunk_size": size}

    for layer in chunked:
        layer.register_forward_pre_hook(tell, with_kwargs=True)


class _Told(Exception):
    """Rows have reached attention, with this softmax."""

    def __init__(self, softmax: Softmax) -> None:
        super().__init__()
        self.softmax = softmax


def rows_problem(hf: PreTrainedModel, backend: AttentionBackend = "auto") -> str:
    """Why rows cannot be packed or split with a model on `meta` that was built with this attention; empty if they can.

    They can if its forward pass takes the places of tokens and is seen to hand on to attention the layout of rows. A
    model that cannot be computed on `meta` as far as its first attention does not show that.

    Raises:
        ValueError: If the backend cannot compute that attention.
    """
    if "position_ids" not in inspect.signature(body_of(hf).forward).parameters:
        return "its forward pass takes no position_ids"
    try:
        pass_on_meta(hf, _tell)
    except _Told as told:
        check_softmax(backend, told.softmax)
        return ""
    except RowsUnknown as error:
        return str(error)
    except MODEL_ERRORS as error:
        return f"its forward pass fails without data before it reaches attention: {type(error).__name__}: {error}"
    return "its forward pass never calls this attention"


def pass_on_meta(hf: PreTrainedModel, attend: Attend) -> None:
    """Compute the body of a model for one token, without its stacked experts.

    Args:
        hf: Model, on `meta` or elsewhere.
        attend: Kernel in place of its attention.

    Raises:
        Exception: One of `MODEL_ERRORS`, if its code needs data.
    """
    place = torch.zeros(1, 1, dtype=torch.long, device=hf.device)
    rows = Rows(place[0], {TOKENS: place[0]})
    layout = Layout(rows, place, place, place[0], None, bounds=((0, 1),), length=1, context=None)
    # with a mask the model does not derive rows from the positions, and of one token it does not look at the mask:
    # neither is possible on `meta`
    inputs = {"input_ids": place, "position_ids": place, "attention_mask": torch.ones_like(place)}
    with _without_experts(hf), torch.no_grad():
        body_of(hf)(**inputs, use_cache=False, layout=layout, attend=attend)


@contextmanager
def _without_experts(hf: PreTrainedModel) -> Iterator[None]:
    """Let tokens pass stacked experts as they are: what multiplies them fails on `meta` in some dtypes."""
    replaced = [(module, vars(module).get("forward")) for module in expert_modules(hf)]
    for module, _ in replaced:
        module.forward = _passed
    try:
        yield
    finally:
        for module, forward in replaced:
            del module.forward
            if forward is not None:
                module.forward = forward


def _passed(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _tell(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
    raise _Told(softmax)


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
        config: Hugging Face config of the model.
        backend: Value of `dtensor_cfg.attention_backend`.
        packed: True if rows lie end to end.
        split: True if rows are split over ranks, by context or sequence parallelism.
        supports_sdpa: True if torch's scaled dot-product attention can be the model's own (`_supports_sdpa` of its
            class).
        rows_problem: Why its attention cannot be told where rows start and end; empty if it can.

    Raises:
        ValueError: If rows of this model cannot be packed or split without one seeing another, or without changing
        its attention, or the backend cannot compute it.
    """
    settings = config.get_text_config().to_dict()
    dropout = settings.get("attention_dropout") or 0.0
    if dropout and backend in WITHOUT_DROPOUT:
        raise ValueError(
            f"dtensor_cfg.attention_backend={backend} has no dropout and the model's attention_dropout is "
            f"{dropout}; set hf_config_overrides.attention_dropout=0, or attention_backend=auto"
        )
    foreign = sorted(set(settings.get("layer_types") or []) - ROW_LAYERS - RECURRENT_LAYERS)
    if not foreign and not rows_problem:
        return ROWS
    if foreign:
        why = f"layers of type {', '.join(foreign)}"
    else:
        why = f"attention that cannot be told where rows start and end ({rows_problem})"
    if packed or split:
        advice = "sequence_packing.enabled=false" if packed else "context_parallel_size=1 and sequence_parallel=false"
        raise ValueError(
            f"rows of a {config.model_type} model cannot be {'packed' if packed else 'split'}: it has {why}; "
            f"set {advice}"
        )
    own = "sdpa" if supports_sdpa and settings.get("attn_logit_softcapping") is None else "eager"
    if backend not in ("auto", "eager", own):
        raise ValueError(
            f"dtensor_cfg.attention_backend={backend} cannot run a {config.model_type} model: it has {why}; "
            f"set attention_backend={own}"
        )
    return own if backend == "auto" else backend


# without an entry for masks, models make none, nor do they look for rows in the positions, for which the host waits
AttentionInterface.register(ROWS, row_attention)
