"""Rows as an algorithm reads them, one by one, to look at before a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from rl_algos.data.config import DatasetConfig
from rl_algos.data.examples import RowCheck
from rl_algos.data.rows.example import Example, Processor, by_keys
from rl_algos.images.image_tokens import image_tokens
from rl_core.errors import DataError
from rl_core.images import ImageRef


@dataclass(frozen=True)
class Text:
    """A string that a model reads, as tokens.

    Args:
        title: Name among the strings of its row, such as `chosen`; empty if there is no other.
        tokens: int32 `[tokens]`.
        learned: uint8 `[tokens]`, 1 on the tokens that the loss applies to; 0 on all of a prompt.
        images: Its images, in the order of their tokens.
    """

    title: str
    tokens: np.ndarray
    learned: np.ndarray
    images: tuple[ImageRef, ...] = ()


class UnusedRow(DataError):
    """A row that a run leaves out and continues without, regardless of `data.malformed`."""


class Refusal(NamedTuple):
    """Why a row is not used.

    Attributes:
        reason: The reason.
        is_fault: True if `data.malformed` decides whether the row ends the run; otherwise it is left out.
    """

    reason: str
    is_fault: bool = True

    @classmethod
    def of(cls, error: DataError) -> Refusal:
        """Return the refusal that an error means."""
        return cls(str(error), not isinstance(error, UnusedRow))


@dataclass(frozen=True)
class RowReader:
    """How an algorithm reads a row of its data.

    Args:
        encode: Returns the strings that a model reads of an example, from the tokenizer, the example and the settings
            of its dataset; raises a `DataError` or a `jinja2.TemplateError` for an example that it refuses.
        limit: Maximum number of tokens of each string.
        limit_key: The keys that set the limit, for messages.
        processor: Processor of datasets without a processor.
        check: Raises a `DataError` for an example that cannot be used; None to accept all.
        environment: Returns the name of the environment that scores an example, empty if nothing does; raises a
            `DataError` if it does not exist. None for an algorithm without rollouts.
    """

    encode: Callable[[Any, Example, DatasetConfig], Sequence[Text]]
    limit: int
    limit_key: str
    processor: Processor = by_keys
    check: RowCheck | None = None
    environment: Callable[[Example, DatasetConfig], str] | None = None

    def texts(self, tokenizer: Any, example: Example, settings: DatasetConfig) -> Sequence[Text] | Refusal:
        """Return the strings of an example, or why it has none.

        Args:
            tokenizer: Tokenizer as `rl_algos.tokenizer.load_tokenizer` returns it.
            example: Example as the processor of its dataset returned it.
            settings: Settings of the example's dataset.
        """
        try:
            return self.encode(tokenizer, example, settings)
        except DataError as error:
            return Refusal.of(error)
        except TemplateError as error:
            return Refusal(f"the chat template refuses it: {error}")

    def refusal(self, example: Example, settings: DatasetConfig) -> Refusal | None:
        """Return why an example cannot be used with any tokenizer; None if it can.

        Args:
            example: Example as the processor of its dataset returned it.
            settings: Settings of the example's dataset.
        """
        try:
            if self.environment is not None:
                self.environment(example, settings)
            if self.check is not None:
                self.check(example, settings)
        except DataError as error:
            return Refusal.of(error)
        return None


def spans(tokenizer: Any, text: Text) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a string, special tokens included, each with True if the loss applies to it. Images are shown
    by their digest, size and number of tokens.

    Args:
        tokenizer: Tokenizer that made the tokens.
        text: Tokens of the string and the mask of the loss.
    """
    bounds = np.flatnonzero(np.diff(text.learned.astype(np.int8), prepend=-1))
    # A separate part may be decoded in another way than within the string, such as without a space before it.
    parts = [text.tokens[:start] for start in bounds] + [text.tokens]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    starts = [str(tokenizer.decode(part.tolist(), **options)) for part in parts]
    images: deque[tuple[str, str]] = deque()
    if (tokens := image_tokens(tokenizer)) is not None:
        for image in text.images:
            written = tokens.of(image.width, image.height)
            size = f"{image.width} x {image.height}, {written.count(tokens.marks.token)} tokens"
            images.append((written, f"[image {image.digest}, {size}]"))
    for bound, start, end in zip(bounds, starts, starts[1:], strict=False):
        part = end[len(start) :]
        while images and images[0][0] in part:
            written, name = images.popleft()
            part = part.replace(written, name, 1)
        yield part, bool(text.learned[bound])
