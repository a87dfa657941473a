"""Sizes of exchanges that the host has read once and that recomputation uses again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a checkpoint's forward pass and of its recomputation, as `torch.utils.checkpoint` asks for them."""


@dataclass(frozen=True)
class ExchangeSizes:
    """Numbers of tokens that a rank exchanges in a layer.

    Args:
        hops: Tokens sent to and received from each rank of a group, for each group that tokens pass through.
        num_choices: Number of choices of this rank's experts.
    """

    hops: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    num_choices: int


class _Tape:
    """Sizes of the exchanges of one checkpoint, in order."""

    def __init__(self) -> None:
        self.sizes: list[ExchangeSizes] = []
        self.position: int | None = None

    def next(self, ask: Callable[[], ExchangeSizes]) -> ExchangeSizes:
        if self.position is None:
            self.sizes.append(ask())
            return self.sizes[-1]
        self.position += 1
        return self.sizes[self.position - 1]


_tape: ContextVar[_Tape | None] = ContextVar("_tape", default=None)


def sizes_of_exchange(ask: Callable[[], ExchangeSizes]) -> ExchangeSizes:
    """Return the sizes of an exchange: those of the forward pass if it is recomputed, otherwise what `ask` returns.

    Args:
        ask: Function that counts tokens with the other ranks and waits for the numbers; collective.
    """
    tape = _tape.get()
    return ask() if tape is None else tape.next(ask)


def keeping_sizes(others: Callable[[], Contexts] | None = None) -> Contexts:
    """Return the contexts of a checkpoint whose recomputation repeats exchanges without asking for their sizes.

    Args:
        others: Function that returns further contexts to enter; None if there are none.
    """
    tape = _Tape()
    forward, recomputation = others() if others is not None else (ExitStack(), ExitStack())
    return _Using(tape, None, forward), _Using(tape, 0, recomputation)


class _Using(AbstractContextManager[None]):
    """Records sizes, or replays them from a position, inside another context."""

    def __init__(self, tape: _Tape, position: int | None, inner: AbstractContextManager[Any]) -> None:
        self._tape = tape
        self._position = position
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._tape.position = self._position
        self._token = _tape.set(self._tape)

    def __exit__(self, *error: Any) -> bool | None:
        _tape.reset(self._token)
        return self._inner.__exit__(*error)
