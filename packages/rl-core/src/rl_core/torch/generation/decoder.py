"""The model that a generator runs, as the generator calls it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from rl_core.errors import WeightSyncError
from rl_core.torch.generation.row import Row
from rl_core.weights import Manifest


class Adoption(Protocol):
    """One weight version on its way into a model, whose tensors are overwritten in place."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Overwrite what is made of the tensor of this name, converting to the model's precision."""

    def verify(self) -> None:
        """Check that every tensor the model computes with is the one that arrived; raises `WeightSyncError` naming
        those that are not."""


def refuse_tensors(manifest: Manifest, names: Iterable[str], problem: str) -> None:
    """Refuse the manifest's weight version if any tensors are at fault.

    Args:
        manifest: Manifest whose version the message shows.
        names: Tensors at fault; often none.
        problem: Problem of all of them, which the message shows before them.

    Raises:
        WeightSyncError: Naming them in alphabetical order.
    """
    found = sorted(names)
    if found:
        message = f"weight version {manifest.version} refused: {problem} {', '.join(found)}"
        raise WeightSyncError(message, tuple(found))


class Decoder(Protocol):
    """A loaded model and the rows that it decodes together, one token each per step; called by one thread."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    @property
    def rows(self) -> Sequence[Row]:
        """Rows under way."""

    def admit(self, waiting: deque[Row], version: int) -> int:
        """Take waiting rows in, as far as there is room, and read their prompts; returns the number of tokens
        sampled."""

    def step(self, version: int) -> int:
        """Decode one token of every row under way; returns the number of tokens sampled. Rows that end leave."""

    def drop_cancelled(self) -> None:
        """Drop rows that nobody waits for any longer."""

    def clear(self) -> list[Row]:
        """Drop all rows and their cache; returns the rows that were there."""

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[tokens]`, logprobs of given tokens at temperature 1; the first is 0."""

    def adoption(self, manifest: Manifest) -> Adoption:
        """Make ready for these weights.

        Raises:
            WeightSyncError: Naming tensors that do not fit the model.
        """

    def offload(self) -> None:
        """Free the device of the weights."""

    def onload(self) -> None:
        """Bring the weights back to the device."""

    def close(self) -> None:
        """Release what outlives the object."""
