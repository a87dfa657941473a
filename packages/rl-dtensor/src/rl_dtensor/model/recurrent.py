"""Token mixers that carry a state along a row (linear attention, Mamba, short convolutions), run on each row alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.torch.training.flops import RECURRENT_LAYERS
from rl_core.torch.training.row_mixing import mix_each_row
from rl_dtensor.model.attention import RowsUnknown
from rl_dtensor.model.layout import Layout
from rl_dtensor.parallel.collectives import gather

Mix = Callable[[Tensor], Tensor]
"""From hidden states `[rows, tokens, hidden]` to the same shape. Rows are padded on the right, which no token of them
sees."""


def recurrent_mixers(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules of a model that carry a state from token to token.

    Of a layer that the config says to be of such a kind, all that are told of more than hidden states; of any layer
    those that can be given the state to start from.

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
        told = inspect.signature(part.forward).parameters
        has_matrices = any(isinstance(module, nn.Linear) for module in part.modules())
        if "cache_params" in told or (is_recurrent and len(told) > 1 and has_matrices):
            yield part
        else:
            yield from _mixers_of(part, is_recurrent=False)


def run_rows_alone(hf: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Make every token mixer that carries a state see each row by itself.

    Args:
        hf: A whole model on `meta`, whose layers will be called with the layout of rows.
        layers: The repeated ones.

    Raises:
        RowsUnknown: If not all of them can be told.
    """
    mixers = {id(mixer) for mixer in recurrent_mixers(hf, layers)}
    for layer in layers:
        here = [module for module in layer.modules() if id(module) in mixers]
        if here:
            rows = _RowsOfLayer()
            layer.register_forward_pre_hook(rows.see, with_kwargs=True)
            for mixer in here:
                rows.wrap(mixer)


class _RowsOfLayer:
    """The rows that a layer computes now; some families hand nothing on to a mixer of what its layer is called with."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def see(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """To be called before the layer is, also when the backward pass computes it again."""
        self._layout = kwargs.get("layout")

    def wrap(self, mixer: nn.Module) -> None:
        """Call a mixer with the hidden states of rows, and with no mask, position or state: those that it would be
        called with are of the rows as they lie."""
        original: Callable[..., Any] = mixer.forward
        first, *others = inspect.signature(original).parameters.values()
        needed = [other.name for other in others if other.default is other.empty and other.kind != other.VAR_KEYWORD]

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._layout is None:
                raise RowsUnknown(f"{type(mixer).__name__} is called without the layout of rows")
            beside: tuple[None, ...] = ()

            def mix(hidden: Tensor) -> Tensor:
                nonlocal beside
                out = original(hidden, **dict.fromkeys(needed))
                if isinstance(out, Tensor):
                    return out
                beside = (None,) * (len(out) - 1)
                mixed: Tensor = out[0]
                return mixed

            mixed = mix_rows(mix, args[0] if args else kwargs[first.name], self._layout)
            return (mixed, *beside) if beside else mixed

        mixer.forward = forward


def mix_rows(mix: Mix, hidden: Tensor, layout: Layout) -> Tensor:
    """Mix the tokens of each row.

    Ranks that share the tokens of rows mix all of them, and each keeps its own: the state at a token follows from all
    tokens before it. The gradient by the hidden states is summed over the ranks, as each has that by its own results.

    Args:
        mix: Function that mixes the tokens of whole rows.
        hidden: `[batch, tokens, hidden]`, of this rank.
        layout: Bounds of the rows, and the ranks that share their tokens.
    """
    context = layout.context
    if context is None:
        return _mix_whole(mix, hidden, layout.bounds)
    whole = gather(hidden, 1, context.group).index_select(1, layout.key_places)
    own = layout.rank_places.chunk(context.size)[context.rank]
    return _mix_whole(mix, whole, layout.bounds).index_select(1, own)


def _mix_whole(mix: Mix, hidden: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Mix rows side by side, or end to end."""
    if len(bounds) == 1:
        return mix(hidden)
    return mix_each_row(mix, hidden[0], [end - start for start, end in bounds])[None]
