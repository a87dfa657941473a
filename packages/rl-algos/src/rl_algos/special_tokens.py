"""Special tokens in the content of messages: found, and tokenised as ordinary text.

A rendered conversation is tokenised as a whole, so content that holds the text of a special token would become that
token: a search result could end its turn and open one of the system. Here content is rendered with a placeholder for
each such text. The rendered text is then tokenised by a copy of the tokenizer whose special tokens have other, secret
texts: these replace the tokens that the template wrote, and placeholders become their original texts. So special
tokens, content and the text around it are tokenised together, as without such content.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rl_algos.images.image_tokens import texts_of
from rl_core.facts.template_ends import template_ends
from rl_core.rollouts.rollout import Message

_log = logging.getLogger(__name__)

SPLIT = "split_special_tokens_in"
"""Attribute of a loaded tokenizer: `policy.tokenizer.split_special_tokens`."""

_SECRET = secrets.token_hex(8)
"""Part of every placeholder and replacement, so that no content can hold one."""

_MAX_ROWS_COUNTED = 50_000
"""Maximum number of rows of a dataset that are searched for special tokens, because large ones are read from disk."""


def splits_observations(tokenizer: Any) -> bool:
    """Return whether special tokens in answers of environments and tools are ordinary text."""
    return getattr(tokenizer, SPLIT, "observations") != "none"


def splits_prompts(tokenizer: Any) -> bool:
    """Return whether special tokens in the messages of datasets are ordinary text."""
    return getattr(tokenizer, SPLIT, "observations") == "all"


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens of a tokenizer, whose tokens do not change, with its present chat template."""
    return _special_tokens(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any, _template: str) -> SpecialTokens:
    return SpecialTokens(tokenizer)


class SpecialTokens:
    """The special tokens of a tokenizer, and the added tokens that end turns in its chat template.

    Args:
        tokenizer: Fast tokenizer, with or without a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ends = template_ends(tokenizer)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        special = [text for text, flag in added.items() if flag or text in (ends.last, ends.earlier)]
        self._placeholders = {text: f"\ue000{_SECRET}p{index}\ue001" for index, text in enumerate(special)}
        self._replacements = {text: f"\ue000{_SECRET}r{index}\ue001" for index, text in enumerate(special)}
        self._texts = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._in_content = _any_of(special)
        self._in_rendered = _any_of([*added, *self._texts])
        self._placeholder = _any_of(self._texts)

    def first_in(self, messages: Iterable[Message]) -> str:
        """Return the first special token in the content of messages; empty if there is none."""
        contents = (text for message in messages for text in texts_of(message))
        found = map(self._in_content.search, contents)
        return next((match[0] for match in found if match), "")

    def hidden(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with placeholders for special tokens in their content, except in the assistant's."""

        def hide(text: str) -> str:
            return self._in_content.sub(lambda match: self._placeholders[match[0]], text)

        found = []
        for message in messages:
            content = message.get("content")
            if message.get("role") != "assistant" and isinstance(content, str):
                message = {**message, "content": hide(content)}
            elif message.get("role") != "assistant" and isinstance(content, list | tuple):
                parts = [
                    {**part, "text": hide(part["text"])} if part.get("type") == "text" else part for part in content
                ]
                message = {**message, "content": tuple(parts)}
            found.append(message)
        return found

    def shown(self, text: str) -> str:
        """Return a string with its placeholders replaced."""
        return self._placeholder.sub(lambda match: self._texts[match[0]], text)

    def after(self, text: str, num_characters: int) -> str:
        """Return a string with placeholders without its first characters, as `shown` counts them."""
        left = num_characters
        pieces = deque(self._pieces(text))
        while pieces and left >= len(piece := self.shown(pieces[0])):
            left -= len(piece)
            pieces.popleft()
        if left and pieces:
            pieces[0] = self.shown(pieces[0])[left:]
        return "".join(pieces)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, with ordinary text in the place of placeholders."""
        if not self.has_placeholders(text):
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        plain, _ = self.for_renamed(text)
        return list(self.renamed.encode(plain, add_special_tokens=False))

    def has_placeholders(self, text: str) -> bool:
        """Return whether a string has placeholders."""
        return self._placeholder.search(text) is not None

    def for_renamed(self, text: str, positions: Sequence[int] = ()) -> tuple[str, list[int]]:
        """Return a rendered text as `renamed` reads it, and the places of positions of the text in it."""
        pieces: list[str] = []
        # These are the ends of matches in the text, and the moves of later positions.
        ends, moved = [0], [0]
        for match in self._in_rendered.finditer(text):
            piece = self._texts.get(match[0]) or self._replacements.get(match[0], match[0])
            pieces += [text[ends[-1] : match.start()], piece]
            ends.append(match.end())
            moved.append(moved[-1] + len(piece) - len(match[0]))
        places = [position + moved[bisect_right(ends, position) - 1] for position in positions]
        return "".join([*pieces, text[ends[-1] :]]), places

    @cached_property
    def renamed(self) -> PreTrainedTokenizerFast:
        """The tokenizer with other strings for its special tokens."""
        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        backend = Tokenizer.from_str(json.dumps(_renamed(described, self._replacements)))
        for text, replacement in self._replacements.items():
            expected = self._tokenizer.convert_tokens_to_ids(text)
            assert backend.token_to_id(replacement) == expected, f"{text} has another id in the copy of the tokenizer"
        end = self._tokenizer.eos_token
        eos_token = self._replacements.get(end, end)
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos_token, clean_up_tokenization_spaces=False
        )

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield the text in order: each placeholder, and the text between them."""
        end = 0
        for match in self._placeholder.finditer(text):
            yield from (text[end : match.start()], match[0])
            end = match.end()
        yield text[end:]


def warn_of_special_tokens(name: str, conversations: Iterable[tuple[str, Sequence[Message]]], tokenizer: Any) -> None:
    """Log how many rows of a dataset have special tokens in their content, which the model reads as special tokens.

    Args:
        name: Name of the dataset.
        conversations: Place and messages of each row.
        tokenizer: Tokenizer of the model.
    """
    if splits_prompts(tokenizer):
        return
    tokens = special_tokens(tokenizer)
    num_rows, found = 0, []
    for place, messages in islice(conversations, _MAX_ROWS_COUNTED):
        num_rows += 1
        if token := tokens.first_in(messages):
            found.append((place, token))
    if found:
        _log.warning(
            "%s: %d of %d rows have special tokens in their content, the first %s at %s. The model reads them as "
            "special tokens, so they may end a turn or start a turn of another role. Set "
            "policy.tokenizer.split_special_tokens: all to read them as text, or remove them.",
            *(name, len(found), num_rows, found[0][1], found[0][0]),
        )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the strings, the longest first as tokenizers match them. Without strings, nothing
    matches."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _renamed(described: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the `tokenizer.json` of a tokenizer with other strings for some tokens, which keep their ids."""
    model = dict(described["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocabulary.items()}
    else:  # A unigram model has scores.
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        # Leave out merges of renamed tokens, and merges that make one.
        kept = [not {first, second, first + second} & names.keys() for first, second in pairs]
        model["merges"] = [pair for pair, is_kept in zip(model["merges"], kept, strict=True) if is_kept]
    added = [
        {**token, "content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in described["added_tokens"]
    ]
    # The post-processor adds special tokens, which the chat template does here.
    return {**described, "model": model, "added_tokens": added, "post_processor": None, "truncation": None}
