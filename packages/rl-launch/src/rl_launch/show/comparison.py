"""Several training runs side by side: their different keys, and their metrics, over seeds where there are
several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rl_core.config import show
from rl_core.config.tree import KeyPath, format_path
from rl_launch.session.directory.run_folder import RunFolder
from rl_launch.session.directory.run_state import SECTION as LABELS
from rl_launch.show.report import MetricSummary, Series, headings, series_of, summaries_of

SEED = "seed"
"""Last name of the keys that seed random numbers."""

MAX_NAMED = 4
"""Maximum number of keys in the name of a group; with more, groups have the name of their first run."""

_WITHOUT_EFFECT = ("run_dir", LABELS)
"""Keys and sections that do not change how a run trains."""


@dataclass(frozen=True)
class RunEstimate:
    """A value over the runs of a group.

    Args:
        mean: Mean over the runs that have it.
        std: Standard deviation of the sample; None for one run.
        num_runs: Number of runs that have it.
    """

    mean: float
    std: float | None
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> RunEstimate:
        """Return the estimate from the value of each run."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + ("" if self.std is None else f" ± {self.std:.2g}")


@dataclass(frozen=True)
class GroupOutcome:
    """A metric of a group.

    Args:
        last: The last value of each run.
        best: The best value of each run; None for a metric without a better end.
    """

    last: RunEstimate
    best: RunEstimate | None


@dataclass(frozen=True)
class RunGroup:
    """Runs whose configs differ in seeds at most.

    Args:
        name: The values that tell it from the others, in words.
        values: Values of the keys that differ between groups; None for one that its runs do not have.
        paths: Folders of the runs.
        seeds: For each run, values of the seeds that differ.
        metrics: By name.
        series: Mean over the runs of each metric, at every step that at least one of them recorded.
        members: Series of each run.
    """

    name: str
    values: Mapping[str, Any]
    paths: tuple[str, ...]
    seeds: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, GroupOutcome]
    series: Series
    members: tuple[Series, ...]


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side.

    Args:
        keys: Keys that differ between the configs, except seeds, the folder and the keys of the logger.
        seeds: Seeds that differ.
        groups: In the order of their first runs.
    """

    keys: tuple[str, ...]
    seeds: tuple[str, ...]
    groups: tuple[RunGroup, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `rl show RUN RUN... --json` prints."""
        groups = [
            {
                "name": group.name,
                "values": dict(group.values),
                "runs": list(group.paths),
                "metrics": {
                    name: {"last": vars(outcome.last), "best": vars(outcome.best) if outcome.best else None}
                    for name, outcome in group.metrics.items()
                },
            }
            for group in self.groups
        ]
        return {"schema": 1, "keys": list(self.keys), "seeds": list(self.seeds), "groups": groups}


def comparison_of(runs: Sequence[RunFolder]) -> RunComparison:
    """Compare runs, finished or in progress."""
    configs = [effective_values(run.config()) for run in runs]
    differing = differing_keys(configs)
    seeds = tuple(key for key in differing if key.rpartition(".")[2] == SEED)
    keys = tuple(key for key in differing if key not in seeds)
    grouped: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        grouped.setdefault(repr([config.get(key, ...) for key in keys]), []).append(index)
    groups = [
        _group([runs[index] for index in members], [configs[index] for index in members], keys, seeds)
        for members in grouped.values()
    ]
    return RunComparison(keys, seeds, tuple(groups))


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that differ between some configs, in the order of the first config that has each.

    Args:
        configs: Values by dotted key, as `effective_values` returns them.
    """
    return [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if any(config.get(key, ...) != configs[0].get(key, ...) for config in configs)
    ]


def effective_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config that change how it trains, by dotted key; a list is one value.

    Args:
        config: The config as nested plain values.
    """
    return dict(_values(config))


def _group(
    runs: Sequence[RunFolder], configs: Sequence[Mapping[str, Any]], keys: Sequence[str], seeds: Sequence[str]
) -> RunGroup:
    rows = [run.metrics() for run in runs]
    members = [series_of(each) for each in rows]
    summaries = [{summary.name: summary for summary in summaries_of(each)} for each in members]
    values = {key: configs[0].get(key) for key in keys}
    means = {}
    for name in dict.fromkeys(name for series in members for name in series):
        by_step: dict[int, list[float]] = {}
        for series in members:
            for step, value in series.get(name, ()):
                by_step.setdefault(step, []).append(value)
        means[name] = [(step, fmean(by_step[step])) for step in sorted(by_step)]
    return RunGroup(
        name=_name(values) if len(keys) <= MAX_NAMED else runs[0].path.name,
        values=values,
        paths=tuple(str(run.path) for run in runs),
        seeds=tuple({key: config.get(key) for key in seeds} for config in configs),
        metrics={
            name: _outcome(summaries, name) for name in dict.fromkeys(name for each in summaries for name in each)
        },
        series=means,
        members=tuple(members),
    )


def _outcome(summaries: Sequence[Mapping[str, MetricSummary]], name: str) -> GroupOutcome:
    found = [each[name] for each in summaries if name in each]
    best = [summary.best for summary in found if summary.best is not None]
    return GroupOutcome(RunEstimate.of([summary.last for summary in found]), RunEstimate.of(best) if best else None)


def _name(values: Mapping[str, Any]) -> str:
    if not values:
        return "all"
    texts = {key: value if isinstance(value, str) else show(value) for key, value in values.items()}
    return ", ".join(f"{heading} {text}" for heading, text in zip(headings(list(texts)), texts.values(), strict=True))


def _values(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config that change how it trains, by dotted key; a list is one value."""
    for name, value in tree.items():
        path = (*above, name)
        if not above and name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, Mapping) and value:
            yield from _values(value, path)
        else:
            yield format_path(path), value
