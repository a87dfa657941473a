"""Flags of messages and rows by which data selects what is learned, under the names that several tools give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_algos.data.example import Example
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

LEARNED_FLAGS = (
    "train",
    "weight",
    "training",
    "trainable",
    "loss",
    "loss_mask",
    "loss_scale",
    "loss_weight",
    "step_loss_mask",
)
"""Keys that select a message for training: axolotl's, OpenAI's, ms-swift's and slime's."""

_UNREAD_FLAGS = ("train_detail", "masked", "mask", "ignore")
"""Keys that select messages, or parts of them, in a way that is not read."""


def _is_one(value: Any) -> bool:
    return value in (True, 1)


def _is_off(value: Any) -> bool:
    return not value


def _is_not_ids(value: Any) -> bool:
    return not (isinstance(value, list | tuple) and any(type(each) is int for each in value))


def _never(_value: Any) -> bool:
    return False


_BY_MESSAGE = "write `train: true` or `train: false` in the messages instead"
_TOKENISED = "rows are tokenised here, so masks of tokens are not read; " + _BY_MESSAGE

_COLUMNS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("train", "training", "trainable", "loss_scale", "loss_weight"), (_is_one, _BY_MESSAGE)),
    "train_detail": (_is_off, _BY_MESSAGE),
    "mask_history": (_is_off, "set sft.learn: last, or " + _BY_MESSAGE),
    "train_on_inputs": (_is_off, "only the assistant's text is learned; remove the column"),
    "train_on_prompt": (_is_off, "only the assistant's text is learned; remove the column"),
    **dict.fromkeys(("loss_mask", "step_loss_mask"), (_never, _TOKENISED)),
    **dict.fromkeys(("completion_mask", "assistant_mask", "assistant_masks"), (_never, _TOKENISED)),
    "labels": (_is_not_ids, _TOKENISED),
}
"""Columns by which other tools select what is learned of a row: values that select nothing, and the remedy."""


def check_columns(example: Example) -> None:
    """Raise a `DataError` if a column of a row selects what is learned in a way that is not read."""
    for name, (is_harmless, remedy) in _COLUMNS.items():
        value = example.info.get(name)
        if value is not None and name not in example.columns and not is_harmless(value):
            raise DataError(f"the column `{name}` selects what is learned, and is not read: {remedy}")


def flag_of(index: int, message: Message) -> bool | None:
    """Return whether a message says that it is learned; None if it says nothing.

    Raises:
        DataError: If it has several flags, or one that is not read.
    """
    given = [key for key in LEARNED_FLAGS if key in message]
    unread = next((key for key in _UNREAD_FLAGS if message.get(key) not in (None, [], ())), None)
    if unread is not None:
        raise DataError(f"message {index} (from 0): `{unread}` is not read; write `train: true` or `train: false`")
    if len(given) > 1:
        raise DataError(f"message {index} (from 0) has both `{given[0]}` and `{given[1]}`; remove one")
    for key in given:
        if message[key] not in (0, 1):
            allowed = "0 or 1" if key == "weight" else "true or false"
            raise DataError(f"message {index} (from 0): `{key}` must be {allowed}, got {message[key]!r}")
        return bool(message[key])
    return None


def without_flags(message: Message) -> Message:
    """Return a message without the flags that select what is learned."""
    return {key: value for key, value in message.items() if key not in LEARNED_FLAGS}
