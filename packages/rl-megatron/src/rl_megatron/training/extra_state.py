"""State that layers keep in addition to their parameters: the scaling history of Transformer Engine's 8-bit recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from rl_megatron.model.model import ReadingModel


def extra_state(model: ReadingModel) -> dict[str, Tensor]:
    """State by chunk and module; empty for a model whose layers keep none."""
    states = {name: module.get_extra_state() for name, module in _keepers(model)}
    # layers that have nothing to keep return None, or a tensor without elements
    kept = {name: state for name, state in states.items() if state is not None}
    for name, state in kept.items():
        assert isinstance(state, Tensor), f"{name} keeps its state as {type(state).__name__}, not as a tensor"
    return {name: state.detach().cpu() for name, state in kept.items() if state.numel()}


def restore_extra_state(model: ReadingModel, states: Mapping[str, Tensor]) -> None:
    """Go on from a state of `extra_state` on the same layout."""
    for name, module in _keepers(model):
        if name in states:
            module.set_extra_state(states[name])


def _keepers(model: ReadingModel) -> Iterator[tuple[str, nn.Module]]:
    for number, chunk in enumerate(model.chunks):
        for name, module in chunk.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{number}/{name}", module
