"""The choice among the data-parallel engines of a replica: the one whose cache has the beginning of a prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

BLOCK = 64
"""Tokens of a prompt that are compared at a time."""

MAX_BLOCKS = 2**17
"""Maximum number of blocks that are remembered."""

SLACK = 16
"""Number of requests that an engine with the beginning of a prompt may have more than the others, in addition to
`SHARE` of their number."""

SHARE = 0.25
"""Share of the requests of the least busy engine that an engine with the beginning of a prompt may have more."""


class ParallelEngines:
    """Requests of several engines that share a front.

    A later turn of a conversation begins with the tokens of the turn before, and the completions of a group with the
    same prompt, so that an engine that had such a request has their keys and values. It is chosen unless it is much
    busier than another. The choice changes no token: a draw depends on the seed of its request.

    Args:
        count: Number of engines.
    """

    def __init__(self, count: int) -> None:
        self._load: Counter[int] = Counter(dict.fromkeys(range(count), 0))
        self._engine_of: dict[str, int] = {}
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, name: str, token_ids: Sequence[int]) -> int:
        """Return the engine for a request, and count it there until `leave`.

        Args:
            name: Name of the request.
            token_ids: Tokens of its prompt.
        """
        least = min(self._load, key=lambda engine: (self._load[engine], engine))
        blocks = list(_blocks(token_ids))
        known = next((self._seen[block] for block in reversed(blocks) if block in self._seen), least)
        limit = self._load[least] * (1 + SHARE) + SLACK
        chosen = known if self._load[known] <= limit else least
        for block in blocks:
            self._seen[block] = chosen
            self._seen.move_to_end(block)
        while len(self._seen) > MAX_BLOCKS:
            self._seen.popitem(last=False)
        self._engine_of[name] = chosen
        self._load[chosen] += 1
        return chosen

    def leave(self, name: str) -> None:
        """Take a request off its engine, if it has one."""
        engine = self._engine_of.pop(name, None)
        if engine is not None:
            self._load[engine] -= 1

    def forget(self) -> None:
        """Forget the prompts: the caches are empty."""
        self._seen.clear()


def _blocks(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield a digest for each whole block of a prompt, of all tokens up to its end."""
    digest = blake2b(digest_size=16)
    tokens = np.asarray(token_ids, dtype=np.int32)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest.update(tokens[end - BLOCK : end].tobytes())
        yield digest.digest()
