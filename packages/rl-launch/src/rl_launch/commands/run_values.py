"""Values of runs by key: of their configs, their metrics, their labels and their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from rl_core.config import did_you_mean
from rl_core.config.keys import value_at
from rl_core.config.tree import format_path, leaves, parse_path
from rl_core.errors import ConfigError
from rl_launch.session.directory.run_folder import RunFolder
from rl_launch.show.condition import Condition
from rl_launch.show.report import Summary, higher_is_better, series_of, summaries_of

_BEST = ":best"


class RunValues:
    """Values of one run by key, each file of which is read when a key first needs it.

    A key is one of `FIELDS`, a metric as `metrics.jsonl` spells it (`val/loss`: its last value, `val/loss:best`: its
    best), or the dotted key of a config (`policy.optimizer.kwargs.lr`).
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def __getitem__(self, key: str) -> Any:
        """The value of a key; None if the run does not have it."""
        if key in FIELDS:
            return FIELDS[key](self)
        if is_metric(key):
            summary = self._summaries.get(key.removesuffix(_BEST))
            return None if summary is None else summary.best if key.endswith(_BEST) else summary.last
        return value_at(self.config, parse_path(key))

    def has(self, key: str) -> bool:
        """Return whether the run has a key, which may be null."""
        if key in FIELDS or self[key] is not None:
            return True
        *around, last = parse_path(key)
        section = value_at(self.config, tuple(around))
        return isinstance(section, dict) and last in section

    @property
    def keys(self) -> list[str]:
        """Every key of the run."""
        return [*FIELDS, *self._summaries, *map(format_path, leaves(self.config))]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's config as nested plain values."""
        return self.run.config()

    @cached_property
    def _summaries(self) -> dict[str, Summary]:
        return {summary.name: summary for summary in summaries_of(series_of(self.run.metrics()))}


FIELDS: dict[str, Callable[[RunValues], Any]] = {
    "state": lambda values: values.run.state().status,
    "step": lambda values: values.run.state().step,
    "algorithm": lambda values: values.run.description().algorithm,
    "model": lambda values: values.run.description().model,
    "name": lambda values: values.run.description().labels.name or values.run.path.name,
    "group": lambda values: values.run.description().labels.group,
    "tags": lambda values: list(values.run.description().labels.tags),
    "notes": lambda values: values.run.description().labels.notes,
}
"""Keys in addition to the keys of the config and the metrics."""


def is_metric(key: str) -> bool:
    """Return whether a key names a metric; keys of a config are joined by dots."""
    return "/" in key


def condition(text: str) -> Condition:
    """Read a condition on a run, such as `state=finished`, `tag=baseline` or `sft.seed<3`.

    Raises:
        ConfigError: If it is not one.
    """
    found = Condition.parse(text, "--filter", "state=finished, tag=NAME or sft.seed=1")
    return replace(found, key="tags") if found.key == "tag" else found


def ordered(runs: Sequence[RunValues], key: str) -> list[RunValues]:
    """Runs by the value of a key: ascending, or the best first if it is a metric of which higher is better. Runs that
    do not have the key come last.
    """

    def rank(values: RunValues) -> tuple[int, float, str]:
        value = values[key]
        if value is None:
            return 2, 0.0, ""
        if isinstance(value, int | float):
            return 0, -value if is_metric(key) and higher_is_better(key.removesuffix(_BEST)) else value, ""
        return 1, 0.0, str(value)

    return sorted(runs, key=rank)


def check_keys(runs: Sequence[RunValues], keys: Sequence[str], option: str) -> None:
    """Refuse keys that no run has; nothing is known about keys if there are no runs.

    Raises:
        ConfigError: With the nearest keys.
    """
    for key in keys:
        if runs and not any(values.has(key) for values in runs):
            known = dict.fromkeys(key for values in runs for key in values.keys)
            raise ConfigError(
                f"{option}: none of these runs has {key!r}{did_you_mean(key, known)} A key of the config "
                f"(sft.seed), a metric (val/loss, val/loss:best) or one of {', '.join(FIELDS)} is allowed."
            )
