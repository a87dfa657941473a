"""Training conversations as tokens, with a mask of the assistant's text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from rl_algos.data.rows.learned_flags import flag_of, without_flags
from rl_algos.images.image_tokens import check_images, with_images
from rl_algos.sft.config import LearnedTurns
from rl_algos.sft.marked_template import Span, template_of
from rl_algos.sft.turn_spans import find_turns
from rl_algos.special_tokens import special_tokens, splits_prompts
from rl_algos.template_coverage import with_thoughts_read
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    learn: LearnedTurns = "all",
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens of a conversation with a mask of the loss: the assistant's text and the token that ends its turn.

    Each image has all its tokens, which are not learned. The assistant's text is what
    `rl_algos.sft.turn_spans.find_turns` finds and proves.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages of the conversation, with at least one of the assistant.
        learn: All turns of the assistant or the last one; a message with one of the flags `LEARNED_FLAGS`, such as
            `train: false`, decides for itself. Templates are not shown the flags.
        tools: JSON schemas of the tools that the assistant may call.

    Returns:
        int32 `[tokens]` and uint8 `[tokens]`; the mask of the first token, which nothing predicts, is 0.

    Raises:
        DataError: If no message of the assistant is to be learned, if the template does not tell its turns apart, or if
            the model cannot read the images.
        jinja2.TemplateError: if the template refuses the messages.
    """
    learned = learned_messages(messages, learn)
    plain = with_thoughts_read(tokenizer, list(map(without_flags, messages)), template_of(tokenizer, tools))
    special = special_tokens(tokenizer)
    if splits_prompts(tokenizer):
        plain = special.hidden(plain)
    check_images(tokenizer, plain)
    turns = find_turns(tokenizer, plain, learned, tools)
    reader = tokenizer
    text, ends = with_images(tokenizer, plain, turns.text, [place for span in turns.spans for place in span])
    spans = tuple(zip(ends[::2], ends[1::2], strict=True))
    if special.has_placeholders(text):
        reader = special.renamed
        text, places = special.for_renamed(text, [place for span in spans for place in span])
        spans = tuple(zip(places[::2], places[1::2], strict=True))
    tokens, offsets = _tokens(reader, text, [start for start, _ in spans])
    mask = _mask(offsets, spans)
    if turns.missing_end:
        end = next((index + 1 for index in reversed(range(len(mask))) if mask[index]), len(mask))
        tokens[end:] = [tokenizer.convert_tokens_to_ids(turns.missing_end)]
        mask[end:] = [1]
    mask[0] = 0
    return np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=np.uint8)


def learned_messages(messages: Sequence[Message], learn: LearnedTurns) -> list[bool]:
    """Return by message whether it is learned.

    Raises:
        DataError: If none is, or a flag is not one.
    """
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the conversation has no assistant message to train on, only {roles}; "
            "end the messages with one, or set output_key"
        )
    by_default = set(spoken) if learn == "all" else {spoken[-1]}
    learned = []
    for index, message in enumerate(messages):
        flag = flag_of(index, message)
        if flag and index not in spoken:
            raise DataError(
                f"message {index} (from 0) is marked for training, but its role is {message['role']!r} and only "
                "assistant messages are trained on; remove the flag"
            )
        learned.append(index in by_default if flag is None else flag)
    if not any(learned):
        raise DataError("no assistant message is marked for training; mark one, or remove the row from the data")
    return learned


def _tokens(tokenizer: Tokenizer, text: str, starts: Sequence[int]) -> tuple[list[int], list[Span]]:
    """Return the tokens of a string, with the part of the string that each covers.

    Each turn is tokenised apart from its prompt, as in generation: otherwise a token could join the end of a prompt
    and the start of a turn, or a prompt could have other tokens than the model reads when it generates.
    """
    whole, offsets = _encoded(tokenizer, text)
    if all(_begins_apart(tokenizer, text, start, whole, offsets) for start in starts):
        return whole, offsets
    tokens: list[int] = []
    spans: list[Span] = []
    for first, last in pairwise([0, *starts, len(text)]):
        piece, found = _encoded(tokenizer, text[first:last], inside=first > 0)
        tokens += piece
        spans += [(first + start, first + end) for start, end in found]
    if tokenizer.decode(tokens) != tokenizer.decode(whole):
        return whole, offsets  # the tokenizer writes a mark at the start of every string
    return tokens, spans


def _begins_apart(tokenizer: Tokenizer, text: str, start: int, tokens: Sequence[int], offsets: Sequence[Span]) -> bool:
    """Return whether a turn follows the tokens of its prompt; an added token parts what surrounds it."""
    end = bisect_left(offsets, start, key=lambda span: span[0])
    if end and offsets[end - 1][1] > start:
        return False
    added = _added_tokens(tokenizer)
    first = next((index + 1 for index in reversed(range(end)) if tokens[index] in added), 0)
    if first == end:
        return True
    begin = offsets[first - 1][1] if first else 0
    return _encoded(tokenizer, text[begin:start], inside=first > 0)[0] == list(tokens[first:end])


@lru_cache(maxsize=8)
def _added_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.added_tokens_decoder)


def _encoded(tokenizer: Tokenizer, text: str, *, inside: bool = False) -> tuple[list[int], list[Span]]:
    """Return tokens and offsets of a string, or of a string inside a longer one, which has no mark of a start."""
    if not inside:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoding["input_ids"]), list(encoding["offset_mapping"])
    before = str(tokenizer.eos_token)
    tokens, offsets = _encoded(tokenizer, before + text)
    return tokens[1:], [(max(start - len(before), 0), end - len(before)) for start, end in offsets[1:]]


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Return 1 for tokens that start inside a span; a token that straddles its start belongs to the prompt."""
    starts = np.array([start for start, _ in offsets], dtype=np.int64)
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    if not len(bounds):
        return [0] * len(starts)
    span = np.searchsorted(bounds[:, 0], starts, side="right") - 1
    inside: list[int] = ((span >= 0) & (starts < bounds[span, 1])).astype(int).tolist()
    return inside
