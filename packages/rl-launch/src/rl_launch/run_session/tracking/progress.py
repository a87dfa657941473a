"""The progress of a run: a live line on a terminal, and a line per step in a log."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

IDLE = 0.2
"""Share of the time for which training, or the generators, may have nothing to do."""

ENDS = 4
"""Steps at either end of a run that are not judged: rollouts do not run ahead in the first ones yet, and none are left
to run ahead of the last ones."""

WINDOW = 11
"""Steps that are judged together, by their median; an odd number, so that it is the share of a step."""


_logger = logging.getLogger(__name__)

SECONDS_PER_LINE = 1.0
"""Least time between the lines of two steps; the first, the last and those with a validation always have theirs."""

_BARS = "▁▂▃▄▅▆▇█"

_OF_SPINNER = 3

_REPLICAS = "generation/replicas"

_ACCURACY, _REWARD = "val/accuracy", "val/reward"
_SHOWN: tuple[tuple[str, str], ...] = (
    ("reward/mean", "reward"),
    ("train/loss", "loss"),
    (_ACCURACY, "accuracy"),
    (_REWARD, "val reward"),
    ("val/loss", "val loss"),
)


def steady(shares: Sequence[float]) -> Sequence[float]:
    """Return the shares of a run's steps to judge it by; empty if it is too short."""
    within = shares[ENDS:-ENDS]
    return within[-max(WINDOW, len(shares) // 4) :] if len(within) >= WINDOW else ()


def imbalance(trainer: float, generators: float, *, section: str = "") -> tuple[str, str] | None:
    """Return who waits, with the figures, and what to change; None if neither waits for long.

    Args:
        trainer: Share of the time that training waits for rollouts, `idle/trainer`.
        generators: Share of the time that generators have no rollouts, `idle/generators`.
        section: Section of the config that has `async_grpo`, as a prefix of keys.
    """
    ahead = f"{section}.async_grpo" if section else "async_grpo"
    resources = "policy.generation.colocated.resources.gpus_per_node"
    training_waits = f"training waits for rollouts {trainer:.0%} of the time"
    rollouts = (
        f"let more prompts run ahead ({ahead}.max_trajectory_age_steps), or bound the longest rollout "
        "(policy.generation.max_new_tokens)"
    )
    if trainer > IDLE and generators > IDLE:
        interrupt = f"let weight updates interrupt rollouts ({ahead}.in_flight_weight_updates)"
        return f"{training_waits}, and generators have none {generators:.0%} of it", f"{interrupt}, {rollouts}"
    if trainer > IDLE:
        return training_waits, f"give generation more devices ({resources}), {rollouts}"
    if generators > IDLE:
        slower = f"training is the slower side: give generation fewer devices ({resources}) and training more"
        return f"generators have no rollouts {generators:.0%} of the time", slower
    return None


class Balance:
    """Watches a window of steps of a run for a side that waits.

    Attributes:
        found: Who waits and what to change; None if neither side waits for long.
    """

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None
        self._num_steps = 0
        self._shares: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def observe(self, metrics: Mapping[str, float], *, steps_left: int) -> None:
        """Take the metrics of a step; one whose rollouts do not run ahead of training has no effect."""
        if "idle/trainer" not in metrics or steps_left < ENDS:
            return
        self._num_steps += 1
        if self._num_steps > ENDS:
            self._shares.append((metrics["idle/trainer"], metrics.get("idle/generators", 0.0)))
        if len(self._shares) == WINDOW:
            self.found = imbalance(*(median(shares) for shares in zip(*self._shares, strict=True)))

    def __str__(self) -> str:
        return "" if self.found is None else f"{self.found[0]}: {self.found[1]}"


class RunProgress:
    """Shows steps, phases and the metrics people watch.

    Args:
        title: Title of the run.
        console: Shows the live line, if it is a terminal.
        clock: Seconds, for the times that are shown.

    Attributes:
        close: Takes the live line away.
    """

    def __init__(self, title: str, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._clock = clock
        self._console = console
        self._told_at: float | None = None
        self._step, self._max_steps = 0, 0
        self._phase, self._phase_since = "", clock()
        self._shown: dict[str, float] = {}
        self._trend: deque[float] = deque(maxlen=24)
        self._durations: deque[float] = deque(maxlen=20)
        self._balance = Balance()
        self._told_remedy: str | None = None
        self._replica_counts: set[float] = set()
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self.close = self._live.stop

    def start(self) -> None:
        """Show the live line, on a terminal."""
        if self._is_live:
            self._live.start()

    def begin(self, step: int, max_steps: int) -> None:
        """Begin a step."""
        self._step, self._max_steps = step, max_steps

    def phase(self, name: str) -> None:
        """Note the phase in progress; empty for none."""
        self._phase, self._phase_since = name, self._clock()

    def finish(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """End a step with these metrics."""
        self._durations.append(seconds)
        self._balance.observe(metrics, steps_left=self._max_steps - step)
        self._replica_counts |= {metrics[key] for key in [_REPLICAS] if key in metrics}
        # The number of replicas is shown once it has changed.
        told = (*_SHOWN, (_REPLICAS, "replicas")) if len(self._replica_counts) > 1 else _SHOWN
        if _ACCURACY in metrics:
            # The reward of an environment that reports its accuracy has the same meaning.
            told = tuple(each for each in told if each[0] != _REWARD)
        self._shown |= {label: metrics[key] for key, label in told if key in metrics}
        trend = next((metrics[key] for key, _ in _SHOWN if key in metrics), None)
        if trend is not None:
            self._trend.append(trend)
        # Quick steps share a line a second, in a pipe as in the log.
        is_due = self._told_at is None or self._clock() - self._told_at >= SECONDS_PER_LINE
        if not (is_due or step == self._max_steps or any(key.startswith("val/") for key in metrics)):
            return
        self._told_at = self._clock()
        values = "  ".join(f"{label} {metrics[key]:.4g}" for key, label in told if key in metrics)
        # the live line has it all the time, and the log once
        remedy = self._balance.found and self._balance.found[1]
        waits = f"  {self._balance}" if remedy not in (None, self._told_remedy) else ""
        self._told_remedy = remedy or self._told_remedy
        _logger.info(
            "step %d/%d  %s  %.1f s  %s left%s", step, self._max_steps, values, seconds, self._left(step), waits
        )

    def render(self) -> RenderableType:
        """Return the live line: as much as fits, most important first."""
        texts = [Text(self._title, style="bold")]
        if self._max_steps:
            texts.append(Text(f"step {self._step}/{self._max_steps}"))
        if self._phase:
            texts.append(
                Text(f"{self._phase.replace('_', ' ')} {self._clock() - self._phase_since:.0f} s", style="dim")
            )
        texts.extend(Text(f"{label} {value:.4g}") for label, value in self._shown.items())
        if self._durations:
            texts.append(Text(f"{self._left(self._step - 1)} left", style="dim"))
        if str(self._balance):
            texts.append(Text(str(self._balance), style="yellow"))
        if self._trend:
            texts.append(Text(sparkline(self._trend), style="green"))
        line = Text(no_wrap=True, overflow="ellipsis")
        room = self._console.width - _OF_SPINNER
        for text in texts:
            if len(line) + len(text) <= room or not line:
                line.append(text).append("  ")
        cells = Table.grid(padding=(0, 1))
        cells.add_row(self._spinner, line)
        return cells

    def _left(self, done: int) -> str:
        return duration((self._max_steps - done) * sum(self._durations) / max(len(self._durations), 1))


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars between the smallest and the largest."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in finite)


def duration(seconds: float) -> str:
    """Return seconds as people write them: `42 s`, `3:07`, `1:02:03`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
