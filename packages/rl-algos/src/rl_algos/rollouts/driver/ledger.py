"""Exactly-once accounting: the state of every prompt that was drawn."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_PENDING = 0
"""Version of a draw that has not left."""
_TRAINED = 0
"""Reason of a draw that was trained; the reasons of dropped draws count from 1."""


class Ledger:
    """State of every draw of a run. A draw is pending until it is trained, or dropped for a reason; it leaves once.

    Draws are numbered from 0 in the order their prompts were taken. The ledger also keeps the weight version
    that the step of a draw led to, and a digest of its prompt's id, so that the rollouts that a run has written can be
    compared with it. It takes 9 bytes a draw.
    """

    def __init__(self) -> None:
        self._versions = array("i")
        self._reasons = array("B")
        self._digests = array("I")
        self._reason_texts: list[str] = []
        self._num_pending = 0

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return len(self._versions)

    @property
    def num_pending(self) -> int:
        """Draws that have not left."""
        return self._num_pending

    def draw(self, prompt_ids: Sequence[str]) -> range:
        """Give numbers to the next draws, which become pending."""
        first = self.num_drawn
        self._versions.extend([_PENDING] * len(prompt_ids))
        self._reasons.extend([_TRAINED] * len(prompt_ids))
        self._digests.extend(map(digest, prompt_ids))
        self._num_pending += len(prompt_ids)
        return range(first, self.num_drawn)

    def train(self, draws: Iterable[int], version: int) -> None:
        """Note that pending draws were trained.

        Args:
            draws: Numbers of the draws.
            version: Weights that the step led to, from 1.
        """
        self._leave(draws, version, _TRAINED)

    def drop(self, draws: Iterable[int], version: int, reason: str) -> None:
        """Note that pending draws train nothing, and why.

        Args:
            draws: Numbers of the draws.
            version: Weights that the step of the draw led to, from 1.
            reason: Reason why they are dropped; not empty.
        """
        assert reason, "a draw is dropped for a reason"
        if reason not in self._reason_texts:
            self._reason_texts.append(reason)
        self._leave(draws, version, 1 + self._reason_texts.index(reason))

    def pending(self) -> list[int]:
        """Return the draws that have not left, in order."""
        found: list[int] = np.flatnonzero(np.asarray(self._versions) == _PENDING).tolist()
        return found

    def trained(self) -> Mapping[int, list[int]]:
        """Return the draws that were trained, by the version that their step led to."""
        versions, reasons = np.asarray(self._versions), np.asarray(self._reasons)
        return _by_key(versions, (versions != _PENDING) & (reasons == _TRAINED))

    def dropped(self) -> Mapping[str, list[int]]:
        """Return the draws that train nothing, by the reason."""
        reasons = np.asarray(self._reasons)
        return {self._reason_texts[key - 1]: draws for key, draws in _by_key(reasons, reasons != _TRAINED).items()}

    def left(self) -> Mapping[int, list[int]]:
        """Return the draws that were trained or dropped, by the version that their step led to."""
        versions = np.asarray(self._versions)
        return _by_key(versions, versions != _PENDING)

    def digest(self, index: int) -> int:
        """Return the digest of the prompt's id of a draw."""
        return self._digests[index]

    def is_of(self, index: int, prompt_id: str) -> bool:
        """Return whether a draw may be of this prompt; for another prompt this is wrong with probability 2^-32."""
        return self._digests[index] == digest(prompt_id)

    def state(self) -> Mapping[str, Any]:
        """Return plain data for `restore`."""
        return {
            "versions": np.array(self._versions, dtype=np.int32),
            "reasons": np.array(self._reasons, dtype=np.uint8),
            "digests": np.array(self._digests, dtype=np.uint32),
            "reason_texts": list(self._reason_texts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: If it is not the state of a ledger.
        """
        versions, reasons, digests = (np.asarray(state[name]) for name in ("versions", "reasons", "digests"))
        texts = [str(text) for text in state["reason_texts"]]
        if not versions.shape == reasons.shape == digests.shape or versions.ndim != 1:
            raise ValueError(
                f"a ledger has one version, reason and digest per draw, got {versions.size}, {reasons.size} and "
                f"{digests.size}"
            )
        if versions.size and (versions.min() < _PENDING or reasons.max() > len(texts)):
            raise ValueError(
                f"a ledger has versions from 0 and reasons up to {len(texts)}, got a version of {versions.min()} and a "
                f"reason of {reasons.max()}"
            )
        if ((versions == _PENDING) & (reasons != _TRAINED)).any():
            raise ValueError("a ledger has draws that are pending and dropped at once")
        self._versions, self._reasons = array("i", versions.tolist()), array("B", reasons.tolist())
        self._digests, self._reason_texts = array("I", digests.tolist()), texts
        self._num_pending = int((versions == _PENDING).sum())

    def _leave(self, draws: Iterable[int], version: int, reason: int) -> None:
        for index in draws:
            assert version > _PENDING, f"weight versions count from 1, got {version}"
            assert 0 <= index < self.num_drawn, f"draw {index} was never made; {self.num_drawn} were"
            assert self._versions[index] == _PENDING, f"draw {index} left at version {self._versions[index]} already"
            self._versions[index], self._reasons[index] = version, reason
            self._num_pending -= 1


def digest(prompt_id: str) -> int:
    """Return a number below 2^32 that follows from a prompt's id."""
    return zlib.crc32(prompt_id.encode("utf-8", errors="surrogatepass"))


def _by_key(keys: np.ndarray, chosen: np.ndarray) -> dict[int, list[int]]:
    """Return the indices of chosen entries by their key, in order."""
    indices = np.flatnonzero(chosen)
    order = indices[np.argsort(keys[indices], kind="stable")]
    values, starts = np.unique(keys[order], return_index=True)
    parts = np.split(order, starts[1:]) if len(values) else []
    return {int(value): part.tolist() for value, part in zip(values, parts, strict=True)}
