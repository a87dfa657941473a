"""Causal attention within each row, over rows that lie end to end or side by side and may be split over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
from rl_dtensor.model.layout import RowLayout, Segments
from rl_dtensor.parallel.body import body_of
from rl_dtensor.parallel.collectives import exchange, gather
from rl_dtensor.parallel.experts import expert_modules

ROWS = "rl_rows"
"""Name of this attention for `transformers` models."""

INERT = frozenset({"use_cache", *TransformersKwargs.__annotations__})
"""Keyword arguments that models pass on to every attention function, and that do not change its result."""

MODEL_ERRORS = (NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code on tensors without data."""

WITHOUT_DROPOUT: tuple[AttentionBackend, ...] = ("flash_attention_3", "flex")


QueryScale = Callable[[Tensor], Tensor]
"""From the places of tokens in their rows, int64 `[batch, tokens]`, to float32 factors of their queries."""


class RowsUnknown(ValueError):
    """Attention was called without the layout of rows, or with something that it does not compute with."""


class Seam:
    """Stands for the kernel of attention in a part of a layer that ends at attention, or begins there.

    Args:
        attended: Result of attention, `[batch, tokens, heads, head_dim]`; None in the part that ends there.

    Attributes:
        heads: Queries, keys and values that attention was called with.
        options: Other arguments of that call, by name.
    """

    def __init__(self, attended: Tensor | None = None) -> None:
        self._attended = attended
        self.heads: tuple[Tensor, ...] = ()
        self.options: dict[str, Any] = {}

    def meet(self, *heads: Tensor, **options: Any) -> Tensor:
        """Keep the arguments of a call; return the result that was given, or one without values.

        Raises:
            RowsUnknown: If attention was called before.
        """
        if self.heads:
            raise RowsUnknown("a layer calls attention twice")
        self.heads, self.options = heads, options
        query, _, value = heads
        shape = (len(query), query.shape[2], query.shape[1], value.shape[-1])
        return query.new_empty(shape) if self._attended is None else self._attended


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: RowLayout | None = None,
    attend: Attend | Seam | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    chunk_size: int | None = None,
    query_scale: QueryScale | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each row, as an attention function of `transformers`.

    Padding on the right needs no mask: no token of the row comes after it.

    Args:
        module: Attention layer that calls the function; it must be causal.
        query: `[batch, heads, tokens, head_dim]`.
        key: Same layout as `query`; may have fewer heads.
        value: Same layout as `key`.
        attention_mask: None; the rows' bounds replace it.
        layout: Rows, and their tokens on this rank.
        attend: Kernel that computes attention once all keys that a query sees are here, or a `Seam`, which needs no
            layout.
        scaling: Scaling of the products; `head_dim ** -0.5` if None.
        dropout: Share of the attention weights that is dropped.
        sliding_window: Tokens that each token sees, itself included; all before it if None.
        softcap: Bounds the scores; see `Softmax`.
        s_aux: Sinks, `[heads]`; see `Softmax`.
        chunk_size: Tokens of each chunk of a row; no token sees tokens of other chunks. The whole row if None.
        query_scale: Factors of the queries; 1 if None.
        **others: Other arguments that the model passes; all that are not None must be in `INERT`.

    Returns:
        `[batch, tokens, heads, head_dim]`.

    Raises:
        RowsUnknown: If the model did not pass on the layout and the kernel of its forward pass, or passes on arguments
            that are not used here.
    """
    if attend is None or (layout is None and not isinstance(attend, Seam)):
        raise RowsUnknown(f"{type(module).__name__} calls attention without the layout of rows")
    foreign = sorted(name for name, value in others.items() if value is not None and name not in INERT)
    if attention_mask is not None:
        foreign.append("a mask of its own")
    if not getattr(module, "is_causal", True):
        foreign.append("is_causal=False")
    if foreign:
        raise RowsUnknown(f"{type(module).__name__} calls attention with {', '.join(foreign)}")
    if isinstance(attend, Seam):
        scores = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        places = {"chunk_size": chunk_size, "query_scale": query_scale}
        return attend.meet(query, key, value, s_aux=s_aux, **scores, **places), None
    assert layout is not None
    if query_scale is not None:
        query = (query * query_scale(layout.position_ids)[:, None, :, None]).to(query.dtype)
    context, softmax = layout.context, Softmax(scaling, dropout, sliding_window, softcap, s_aux)
    segments = layout.segments_of(sliding_window)
    segments = segments if chunk_size is None else segments.chunked(chunk_size)
    if context is None:
        out = attend(query, key, value, segments, softmax)
    elif context.method == "all_gather":
        places = layout.key_places
        key, value = (gather(part, 2, context.group).index_select(2, places) for part in (key, value))
        out = attend(query, key, value, segments, softmax)
    else:
        # Ulysses: ranks trade their tokens of all heads for all tokens of some heads, and back.
        size, ones = context.size, [1] * context.size
        if key.shape[1] % size:
            key, value = (part.repeat_interleave(size // part.shape[1], 1) for part in (key, value))

        def traded(x: Tensor, split_dim: int, joined_dim: int) -> Tensor:
            parts = torch.stack(x.chunk(size, split_dim))
            return torch.cat(exchange(parts, ones, ones, context.group).unbind(0), joined_dim)

        query, key, value = (traded(part, 1, 2).index_select(2, layout.key_places) for part in (query, key, value))
        if s_aux is not None:
            softmax = replace(softmax, sinks=s_aux.chunk(size)[context.rank])
        out = attend(query, key, value, segments, softmax)
        out = traded(out.index_select(2, layout.rank_places), 2, 1)
    return out.transpose(1, 2).contiguous(), None


def tell_chunks(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Make layers of chunked attention report the chunk length; their code has it only in a mask, which rows replace.

    Args:
        hf: Model, whose config has the kind of each layer and the chunk length.
        layers: Repeated layers of the model, in order.

    Raises:
        RowsUnknown: If the config has no chunk length.
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


class _Reached(Exception):
    """Rows have reached attention, with the softmax in `args`."""


def rows_problem(hf: PreTrainedModel, backend: AttentionBackend = "auto") -> str:
    """Return why rows cannot be packed or split with a model on `meta` that has this attention; empty if they can.

    They can if its forward pass takes the places of tokens and passes the layout of rows on to attention. A model that
    cannot be computed on `meta` up to its first attention does not show that.

    Raises:
        ValueError: If the backend cannot compute that attention.
    """
    if "position_ids" not in inspect.signature(body_of(hf).forward).parameters:
        return "its forward pass takes no position_ids"

    def reached(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        raise _Reached(softmax)

    try:
        pass_on_meta(hf, reached)
    except _Reached as stop:
        check_softmax(backend, stop.args[0])
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
    layout = RowLayout(rows, place, place, place[0], None, bounds=((0, 1),), length=1, context=None)
    # Without a mask the model would derive rows from the positions, and it reads a mask of several tokens. Neither is
    # possible on `meta`.
    inputs = {"input_ids": place, "position_ids": place, "attention_mask": torch.ones_like(place)}
    # Tokens pass stacked experts unchanged, because their products fail on `meta` in some dtypes.
    replaced = [(module, vars(module).get("forward")) for module in expert_modules(hf)]
    for module, _ in replaced:
        module.forward = lambda hidden, *_, **__: hidden
    try:
        with torch.no_grad():
            body_of(hf)(**inputs, use_cache=False, layout=layout, attend=attend)
    finally:
        for module, forward in replaced:
            del module.forward
            if forward is not None:
                module.forward = forward


def attention_for(
    config: PreTrainedConfig,
    backend: AttentionBackend,
    *,
    packed: bool,
    split: bool,
    supports_sdpa: bool,
    rows_problem: str = "",
) -> str:
    """Return the name of the attention implementation that `transformers` should use.

    Args:
        config: Hugging Face config of the model.
        backend: Value of `dtensor_cfg.attention_backend`.
        packed: True if rows lie end to end.
        split: True if rows are split over ranks, by context or sequence parallelism.
        supports_sdpa: True if torch's scaled dot-product attention can be the model's own (`_supports_sdpa` of its
            class).
        rows_problem: Reason why its attention does not get the bounds of rows; empty if it does.

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


# Without an entry for masks, models make none. They also do not look for rows in the positions, which the host would
# wait for.
AttentionInterface.register(ROWS, row_attention)
