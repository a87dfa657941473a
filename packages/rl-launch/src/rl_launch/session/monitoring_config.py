"""Settings of the monitoring of a run: readings of machines and workers, and notifications."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rl_core.config import Config, Problem, ProblemError

Event = Literal["finished", "failed", "interrupted", "resumed", "stalled", "alarm"]
"""Changes of a run's state that somebody may want to know."""


class MonitoringConfig(Config):
    """How often machines and workers are read."""

    period_s: float = Field(default=10.0, ge=1.0)
    """Seconds between two readings. Each reading is one call of every worker, answered next to its work within
    milliseconds; a step shorter than this has one reading."""


class NotifyConfig(Config):
    """Who is told when the state of a run changes. Nothing is sent without `url` or `command`."""

    url: str | None = None
    """Webhook that gets a POST of JSON with `event`, `text`, `run`, `run_dir`, `step`, `max_steps`, `reason`, `host`
    and `at`. Webhooks of Slack and Mattermost show `text`. If the URL contains a secret, write `${oc.env:NAME}`,
    because the config is stored with the run; logs show the host only."""
    command: list[Annotated[str, Field(min_length=1)]] = []
    """Program with its arguments that is run on the driver's machine, without a shell. It gets the same JSON on
    standard input, and its values as `RL_EVENT`, `RL_TEXT`, `RL_RUN` and so on in the environment."""
    events: list[Event] = ["finished", "failed", "interrupted", "resumed", "stalled", "alarm"]
    """Events to notify of. `interrupted` is a signal or a time limit, `resumed` a run that continues from a checkpoint.
    `stalled` is no step for `stalled_after` times the usual time. `alarm` is a metric that is not a finite number, or a
    finding of the advice that `rl show` prints; each is sent once."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout in seconds of an attempt. Failed attempts are repeated after 2, 10 and 30 seconds, in the background."""
    stalled_after: float = Field(default=5.0, gt=1)
    """Multiple of the usual time between two steps after which a run is stalled, but at least one minute. The usual
    time is the median of the last 16."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        # the value may be a secret, so the message does not repeat it
        if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            raise ProblemError(Problem("", "is not a URL", allowed="http://HOST/... or https://HOST/..."))
        return value

    @property
    def is_enabled(self) -> bool:
        """True if somebody is told."""
        return bool(self.url or self.command)
