"""Flags of messages and rows that select the learned part of data, under the names that several tools give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import not_
from typing import Any

from rl_algos.data.rows.example import Example
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

_LOSS_FLAGS = ("loss", "loss_mask", "loss_scale", "loss_weight", "step_loss_mask")
LEARNED_FLAGS = ("train", "weight", "training", "trainable", *_LOSS_FLAGS)
"""Keys that select a message for training: axolotl's, OpenAI's, ms-swift's and slime's."""

_UNREAD_FLAGS = ("train_detail", "masked", "mask", "ignore")
"""Keys that select messages, or parts of them, in a way that is not read."""


def _is_one(value: Any) -> bool:
    return value in (True, 1)


def _is_not_ids(value: Any) -> bool:
    return not (isinstance(value, list | tuple) and any(type(each) is int for each in value))


_BY_MESSAGE = "write `train: true` or `train: false` in the messages instead"
_TOKENISED = "rows are tokenised here, so masks of tokens are not read; " + _BY_MESSAGE

_MASKS = ("loss_mask", "step_loss_mask", "completion_mask", "assistant_mask", "assistant_masks")
_COLUMNS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("train", "training", "trainable", "loss_scale", "loss_weight"), (_is_one, _BY_MESSAGE)),
    "train_detail": (not_, _BY_MESSAGE),
    "mask_history": (not_, "set sft.learn: last, or " + _BY_MESSAGE),
    "train_on_inputs": (not_, "only the assistant's text is learned; remove the column"),
    "train_on_prompt": (not_, "only the assistant's text is learned; remove the column"),
    **dict.fromkeys(_MASKS, (lambda _value: False, _TOKENISED)),
    "labels": (_is_not_ids, _TOKENISED),
}
"""Columns of other tools that select the learned part of a row: values that select nothing, and the remedy."""


def check_columns(example: Example) -> None:
    """Raise a `DataError` if a column of a row selects the learned part in a way that is not read."""
    for name, (is_harmless, remedy) in _COLUMNS.items():
        value = example.info.get(name)
        if value is not None and name not in example.columns and not is_harmless(value):
            raise DataError(f"the column `{name}` selects what is learned, and is not read: {remedy}")


def flag_of(index: int, message: Message) -> bool | None:
    """Return whether a message's flag selects it; None if it has none.

    Raises:
        DataError: If it has several flags, or one that is not read.
    """
    given = [key for key in LEARNED_FLAGS if key in message]
    unread = next((key for key in _UNREAD_FLAGS if message.get(key) not in (None, [], ())), None)
    if unread is not None:
        raise DataError(f"message {index} (from 0): `{unread}` is not read; write `train: true` or `train: false`")
    if len(given) > 1:
        raise DataError(f"message {index} (from 0) has both `{given[0]}` and `{given[1]}`; remove one")
    if not given:
        return None
    [key] = given
    if message[key] not in (0, 1):
        allowed = "0 or 1" if key == "weight" else "true or false"
        raise DataError(f"message {index} (from 0): `{key}` must be {allowed}, got {message[key]!r}")
    return bool(message[key])


def without_flags(message: Message) -> Message:
    """Return a message without the flags that select it for training."""
    return {key: value for key, value in message.items() if key not in LEARNED_FLAGS}
