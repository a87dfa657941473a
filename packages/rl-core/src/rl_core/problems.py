"""Something wrong with a key of a config, as fields, and the sentence that is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from typing import Any

_LONGEST_SHOWN = 60


class _NotGiven(Enum):
    NOT_GIVEN = "no value"


NOT_GIVEN = _NotGiven.NOT_GIVEN
"""The value of a problem that is not about a value."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with one key. Tests compare the fields, so the wording may change.

    `Problem("loss_fn.clip", "must not exceed clip_max (0.2)", got=0.5, remedy="Lower it")` reads
    `got 0.5: must not exceed clip_max (0.2). Lower it`. The origin of the key is added when the problem is reported.

    Args:
        key: Dotted key from the root (in `ProblemError`: from the section that raises it); empty for the whole.
        reason: What is wrong with it, as a clause whose subject is the key or its value.
        got: The value that was found, if the value matters.
        allowed: The values that are accepted, if they can be listed or described in a few words.
        remedy: What to do, as one or more sentences without the last full stop.
        is_unused: True if the key has no effect with the rest of the config, so removing it changes nothing.
        feature: The feature that the key asks for, if it is not offered.
    """

    key: str
    reason: str = ""
    _: KW_ONLY
    got: Any = NOT_GIVEN
    allowed: str = ""
    remedy: str = ""
    is_unused: bool = False
    feature: str = ""

    @classmethod
    def unused(cls, key: str, condition: str, *, remedy: str = "Remove this key") -> Problem:
        """Return the problem of a key that has no effect.

        Args:
            key: Path of the key, such as `loss_fn.span_tau`.
            condition: When it has none, such as `with loss_fn.kl.weight=0`.
            remedy: Advice that follows the problem in the message.
        """
        return cls(key, f"has no effect {condition}", remedy=remedy, is_unused=True)

    @property
    def message(self) -> str:
        """The value, the reason, what is allowed and the remedy, in one line without the key."""
        given = "" if self.got is NOT_GIVEN else f"got {show(self.got)}"
        wrong = ": ".join(filter(None, (given, self.reason)))
        clauses = filter(None, (wrong, self.allowed and f"allowed: {self.allowed}"))
        return ". ".join(filter(None, ("; ".join(clauses), self.remedy)))

    def at(self, key: str) -> Problem:
        """Return the same problem at another key."""
        return replace(self, key=key)

    def rewritten(self, rewrite: Callable[[str], str]) -> Problem:
        """Return the problem with each of its strings, and the value as it is shown, passed through a function."""
        shown = self.got if self.got is NOT_GIVEN else show(self.got)
        new = shown if shown is NOT_GIVEN else rewrite(shown)
        return replace(
            self,
            reason=rewrite(self.reason),
            got=self.got if new == shown else _Written(new),
            allowed=rewrite(self.allowed),
            remedy=rewrite(self.remedy),
        )


class _Written(str):
    """A value as a message shows it, without quotes."""


def show(value: Any) -> str:
    """Return a value as YAML would write it on one line, cut if it is long."""
    text = value if isinstance(value, _Written) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
