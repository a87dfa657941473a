"""Settings and declaration of the environment `match`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement


class MatchConfig(EnvironmentConfig):
    """Compare a response with the row's `answer` (a string or a list of alternatives), `pattern` or `schema`."""

    mode: Literal["exact", "contains", "regex", "json", "json_schema"] = "exact"
    """Comparison of the response with the row. `exact`: the response is the answer; `contains`: the answer is in it;
    `regex`: all of it matches the row's `pattern`; `json`: it is the answer as JSON, regardless of spacing and the
    order of keys; `json_schema`: it is JSON that satisfies the row's `schema`. JSON is the last fenced block marked as
    JSON or without a language, or the whole response. NaN, duplicate keys in an object and more than 32 nested lists
    and objects are not valid JSON."""
    answer_tag: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Compare the last string between `<TAG>` and `</TAG>` instead of the whole response. A response without the tag
    fails."""
    ignore_case: bool = False
    """Compare without regard to case. JSON is compared unchanged."""
    ignore_space: bool = True
    """Count runs of spaces and line breaks as one space, and remove them at both ends."""


PLUGIN = EnvironmentPlugin(
    "match",
    MatchConfig,
    "rl_envs.match.environment:MatchEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.match.environment:check_row",
)
