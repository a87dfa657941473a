"""Microbatches that are on their way to a GPU while it computes on the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rl_core.torch.training.backend import Microbatch, Microbatches


def prepared_ahead(makers: Sequence[Callable[[], Microbatch]], device: torch.device) -> Microbatches:
    """The same microbatches. When one is taken, the next is made and copied on a stream of its own.

    On a device without streams nothing is made before it is taken.

    Args:
        makers: Make the microbatches, in the order in which a pass takes them.
        device: Device that they are copied to.
    """
    if device.type != "cuda":
        return makers
    ahead = _Ahead(makers, torch.cuda.Stream(device))
    return [partial(ahead.take, index) for index in range(len(makers))]


class _Ahead:
    def __init__(self, makers: Sequence[Callable[[], Microbatch]], stream: torch.cuda.Stream) -> None:
        self._makers = makers
        self._stream = stream
        self._ready: dict[int, tuple[Microbatch, torch.cuda.Event]] = {}

    def take(self, index: int) -> Microbatch:
        """A microbatch that the current stream may use."""
        for wanted in (index, index + 1):
            if wanted < len(self._makers) and wanted not in self._ready:
                self._ready[wanted] = self._copied(wanted)
        microbatch, is_there = self._ready.pop(index)
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(is_there)
        for tensor in (microbatch.rows.offsets, *microbatch.rows.columns.values()):
            _keep(tensor, current)
        return microbatch

    def _copied(self, index: int) -> tuple[Microbatch, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            return self._makers[index](), self._stream.record_event()


def _keep(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Have the memory of a tensor reused only after what the stream has been given until it is freed."""
    tensor.record_stream(stream)
