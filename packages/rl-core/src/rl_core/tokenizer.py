"""The tokenizer of a model, as algorithms use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer that are used here."""

    name_or_path: str
    chat_template: Any
    eos_token: str
    eos_token_id: int
    unk_token: str | None
    unk_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id, special ones included."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return `input_ids`, and the other results that the options request."""

    def __hash__(self) -> int: ...

    def __len__(self) -> int:
        """Return the number of tokens of the vocabulary, added ones included."""

    def encode(self, text: Any, **options: Any) -> list[int]:
        """Return the ids of a string's tokens."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of tokens."""

    def convert_tokens_to_ids(self, tokens: str) -> Any:
        """Return the id of a token."""

    def convert_ids_to_tokens(self, ids: list[int]) -> Any:
        """Return the tokens of ids."""

    def get_chat_template(self, **options: Any) -> Any:
        """Return the chat template; a tokenizer may have one for conversations with tools."""

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any:
        """Render a conversation by the chat template."""
