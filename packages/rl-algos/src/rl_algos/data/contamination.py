"""Prompts of an evaluation that the rows of a training dataset contain, or nearly contain.

A prompt is copied if n-grams of eight words that it shares with one row cover more than half of its words, the rule by
which Tulu 3 was decontaminated (arXiv:2411.15124). It is similar if the pairs of successive words in it and in a
message have a Jaccard index of at least 0.45, so that every sixth word may differ. MinHash with locality-sensitive
hashing finds candidates (Broder, 1997), 98 % of those at the threshold, and their index is computed exactly. Words are
compared without case and punctuation, and wording that many prompts share does not count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np

from rl_algos.data.examples import OpenDataset
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

NGRAM = 8
"""Number of words of an n-gram."""
COPIED_SHARE = 0.5
"""Share of a prompt's words; a prompt is copied if shared n-grams cover more of them."""
SIMILARITY = 0.45
"""Minimum Jaccard index of the pairs of words in a similar prompt and message."""
_BANDS, _BAND_ROWS = 42, 3
_COMMON_SHARE, _MIN_COMMON = 0.02, 3
"""An n-gram in more than this share of the prompts, and in more than this number, is the wording of a task, such as
its request for the form of an answer."""
_WORD = re.compile(r"\w+")

Words = tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """A prompt that a training row contains.

    Args:
        kind: `copied` or `similar`.
        place: Place of the first such row.
        share: Share of the words in the prompt's n-grams that shared n-grams cover, or the Jaccard index.
    """

    kind: Literal["copied", "similar"]
    place: str
    share: float


class PromptIndex:
    """Prompts of one evaluation, to look training rows up in.

    Args:
        prompts: Messages of each prompt, by its id. Only the user's words count.

    Attributes:
        overlaps: The strongest overlap of each prompt that has one, by its id; a copied prompt is not also similar.
    """

    def __init__(self, prompts: Mapping[str, Sequence[Message]]) -> None:
        self._ids = list(prompts)
        words = [_words(" ".join(_texts(each, ("user",)))) for each in prompts.values()]
        self._places: dict[Words, list[tuple[int, int]]] = defaultdict(list)
        self._lengths = []
        grams, common = _grams_by_text(words, NGRAM)
        for number, each in enumerate(grams):
            covered: set[int] = set()
            for start, gram in enumerate(each):
                if gram not in common or gram == words[number]:
                    self._places[gram].append((number, start))
                    covered.update(range(start, start + len(gram)))
            self._lengths.append(len(covered))
        pairs, self._common_pairs = _grams_by_text(words, 2)
        self._pairs = [set(each) - self._common_pairs for each in pairs]
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for number, own in enumerate(self._pairs):
            if len(own) >= NGRAM:  # Shorter prompts are similar to many that ask something else.
                for band in _bands(own):
                    self._bands[band].append(number)
        self.overlaps: dict[str, Overlap] = {}

    def add(self, messages: Iterable[Sequence[Message]], place: str) -> None:
        """Look up a training row.

        Args:
            messages: Conversations of the row: its prompt with the answer, and its responses.
            place: Place of the row, for reports.
        """
        covered: dict[int, set[int]] = defaultdict(set)
        for text in dict.fromkeys(text for each in messages for text in _texts(each)):
            words = _words(text)
            for gram in set(_grams(words, NGRAM)):
                for number, start in self._places.get(gram, ()):
                    covered[number].update(range(start, start + len(gram)))
            pairs = set(_grams(words, 2)) - self._common_pairs
            if len(pairs) < NGRAM:
                continue
            for number in {number for band in _bands(pairs) for number in self._bands.get(band, ())}:
                own = self._pairs[number]
                self._note(number, Overlap("similar", place, len(own & pairs) / len(own | pairs)))
        for number, words_covered in covered.items():
            self._note(number, Overlap("copied", place, len(words_covered) / self._lengths[number]))

    def _note(self, number: int, found: Overlap) -> None:
        is_enough = found.share > COPIED_SHARE if found.kind == "copied" else found.share >= SIMILARITY
        known = self.overlaps.get(self._ids[number])
        if is_enough and (known is None or (found.kind, -found.share) < (known.kind, -known.share)):
            self.overlaps[self._ids[number]] = found


def overlaps(
    tasks: Mapping[str, Mapping[str, Sequence[Message]]], datasets: Iterable[OpenDataset]
) -> dict[str, dict[str, Overlap]]:
    """Return the prompts that training rows contain, by task and id.

    Args:
        tasks: Messages of the prompts by their id, for each task.
        datasets: Training datasets; rows that cannot be read are left out.

    Raises:
        DataError: If a dataset is streamed, because all rows are read.
    """
    indexes = {name: PromptIndex(prompts) for name, prompts in tasks.items()}
    for dataset in datasets:
        if dataset.source is not None:
            raise DataError(f"{dataset.name} cannot be searched, because it is streamed; remove `streaming`")
        for number in dataset.numbers:
            try:
                example = dataset.convert(dataset.rows.rows[number])
            except DataError:
                continue
            texts = [example.messages, example.response, *(each.messages for each in example.responses)]
            for index in indexes.values():
                index.add(texts, dataset.rows.place(number))
    return {name: index.overlaps for name, index in indexes.items()}


def _texts(messages: Sequence[Message], roles: Sequence[str] = ("user", "assistant")) -> list[str]:
    """Return the texts of the messages of these roles."""
    contents = [message.get("content") for message in messages if message["role"] in roles]
    parts = [each if isinstance(each, list) else [{"type": "text", "text": each or ""}] for each in contents]
    return [part["text"] for each in parts for part in each if part.get("type") == "text"]


def _words(text: str) -> Words:
    return tuple(_WORD.findall(text.lower()))


def _grams_by_text(texts: Sequence[Words], size: int) -> tuple[list[list[Words]], set[Words]]:
    """Return the n-grams of each text, and those that many of the texts have."""
    grams = [_grams(each, size) for each in texts]
    counts = Counter(gram for each in grams for gram in set(each))
    most = max(_MIN_COMMON, _COMMON_SHARE * len(texts))
    return grams, {gram for gram, count in counts.items() if count > most}


def _grams(words: Words, size: int) -> list[Words]:
    """Return the n-grams of a text in their order; all its words if it is shorter."""
    if len(words) <= size:
        return [words] if words else []
    return [words[start : start + size] for start in range(len(words) - size + 1)]


def _bands(grams: Iterable[Words]) -> list[tuple[int, bytes]]:
    """Return the bands of the MinHash signature of a set."""
    values = np.array([crc32(" ".join(each).encode()) for each in grams], dtype=np.uint64)
    # The upper half of a product that wraps around 2^64 is a universal hash of 32 bits.
    signature = ((_FACTORS[:, None] * values + _TERMS[:, None]) >> np.uint64(32)).min(axis=1)
    return [(number, band.tobytes()) for number, band in enumerate(signature.reshape(_BANDS, _BAND_ROWS))]


_FACTORS, _TERMS = np.random.default_rng(0).integers(0, 1 << 64, (2, _BANDS * _BAND_ROWS), dtype=np.uint64) | np.uint64(
    1
)
