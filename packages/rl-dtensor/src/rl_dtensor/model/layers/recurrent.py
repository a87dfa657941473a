"""Token mixers that carry a state along a row (linear attention, Mamba, short convolutions), run row by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.torch.rows import mix_each_row
from rl_core.torch.training.flops import RECURRENT_LAYERS
from rl_dtensor.model.attention import RowsUnknown
from rl_dtensor.model.layout import RowLayout, taken
from rl_dtensor.parallel.collectives import gather

Mix = Callable[[Tensor], Tensor]
"""From hidden states `[rows, tokens, hidden]` to the same shape. Rows are padded on the right, and no token sees the
padding."""


def recurrent_mixers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of a model that carry a state from token to token.

    In a layer of such a kind by the config, these are all modules that take more than hidden states; in any layer, the
    modules that take the state to start from.

    Args:
        hf: Model, whose config has the kind of each layer.
        layers: Repeated layers of the model, in order.

    Raises:
        RowsUnknown: If a layer of such a kind has none.
    """
    kinds = hf.config.get_text_config().to_dict().get("layer_types") or [""] * len(layers)
    mixers = []
    for layer, kind in zip(layers, kinds, strict=True):
        found = list(_mixers_of(layer, is_recurrent=kind in RECURRENT_LAYERS))
        if kind in RECURRENT_LAYERS and not found:
            raise RowsUnknown(f"no module of {type(layer).__name__} receives anything besides hidden states")
        mixers += found
    return mixers


def _mixers_of(layer: nn.Module, *, is_recurrent: bool) -> Iterator[nn.Module]:
    for part in layer.children():
        taken = inspect.signature(part.forward).parameters
        has_matrices = any(isinstance(module, nn.Linear) for module in part.modules())
        if "cache_params" in taken or (is_recurrent and len(taken) > 1 and has_matrices):
            yield part
        else:
            yield from _mixers_of(part, is_recurrent=False)


def run_rows_alone(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Make every token mixer that carries a state see each row separately.

    Args:
        hf: A whole model on `meta`, whose layers will be called with the layout of rows.
        layers: The repeated ones.

    Raises:
        RowsUnknown: If a layer has no module that can get the layout.
    """
    mixers = {id(mixer) for mixer in recurrent_mixers(hf, layers)}
    for layer in layers:
        here = [module for module in layer.modules() if id(module) in mixers]
        if here:
            # Some families do not pass the layout on to a mixer, so its layer keeps it, also when the backward pass
            # computes the layer again.
            seen: dict[str, RowLayout | None] = {}
            layer.register_forward_pre_hook(partial(_keep_layout, seen), with_kwargs=True)
            for mixer in here:
                _mix_rows_of(mixer, seen)


def _keep_layout(seen: dict[str, RowLayout | None], layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    seen["layout"] = kwargs.get("layout")


def _mix_rows_of(mixer: nn.Module, seen: Mapping[str, RowLayout | None]) -> None:
    """Call a mixer with the hidden states of rows, and without a mask, positions or a state.

    The arguments that its layer passes belong to the rows as the pass has them, not to single rows.
    """
    original: Callable[..., Any] = mixer.forward
    first, *others = inspect.signature(original).parameters.values()
    needed = [other.name for other in others if other.default is other.empty and other.kind != other.VAR_KEYWORD]

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        layout = seen.get("layout")
        if layout is None:
            raise RowsUnknown(f"{type(mixer).__name__} is called without the layout of rows")
        further: tuple[None, ...] = ()

        def mix(hidden: Tensor) -> Tensor:
            nonlocal further
            out = original(hidden, **dict.fromkeys(needed))
            if isinstance(out, Tensor):
                return out
            further = (None,) * (len(out) - 1)
            return cast("Tensor", out[0])

        mixed = mix_rows(mix, args[0] if args else kwargs[first.name], layout)
        return (mixed, *further) if further else mixed

    mixer.forward = forward


def mix_rows(mix: Mix, hidden: Tensor, layout: RowLayout) -> Tensor:
    """Mix the tokens of each row.

    Ranks that share the tokens of rows mix all of them, and each keeps its own: the state at a token follows from all
    tokens before it. The gradient by the hidden states is summed over the ranks, as each has the part of its results.

    Args:
        mix: Function that mixes the tokens of whole rows.
        hidden: `[batch, tokens, hidden]`, of this rank.
        layout: Bounds of the rows, and the ranks that share their tokens.
    """
    context, bounds = layout.context, layout.bounds
    whole = hidden if context is None else gather(hidden, 1, context.group).index_select(1, layout.key_places)
    if layout.tree is not None:
        # The state at the end of a shared prefix is the mixer's own, so each row is mixed from its beginning.
        sequence, originals = layout.whole_rows
        rows = taken(whole[0], 0, sequence)
        mixed = mix_each_row(mix, rows, layout.tree.lengths).index_select(0, originals)[None]
    elif len(bounds) == 1:
        mixed = mix(whole)
    else:
        mixed = mix_each_row(mix, whole[0], [end - start for start, end in bounds])[None]
    if context is None:
        return mixed
    return mixed.index_select(1, layout.rank_places.chunk(context.size)[context.rank])
