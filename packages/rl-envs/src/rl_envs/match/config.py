"""Settings of the environment `match`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.environments.config import EnvironmentConfig


class MatchConfig(EnvironmentConfig):
    """Compare a response with the row's `answer` (a text, or several of which one must fit), `pattern` or `schema`."""

    mode: Literal["exact", "contains", "regex", "json", "json_schema"] = "exact"
    """`exact`: the response is the answer; `contains`: the answer is in it; `regex`: all of it matches the row's
    `pattern`; `json`: it is the answer as JSON, whatever the spacing and the order of keys; `json_schema`: it is JSON
    that satisfies the row's `schema`. JSON is the last fenced block of JSON or without a language, or all of the
    response; NaN, a key twice in an object and more than 32 nested lists and objects are not JSON."""
    answer_tag: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Take the last text between `<TAG>` and `</TAG>` instead of all of the response; a response without it fails."""
    ignore_case: bool = False
    """Whether capital and small letters count as equal; JSON is compared as it is."""
    ignore_space: bool = True
    """Whether runs of spaces and line breaks count as one space, and none at both ends."""
