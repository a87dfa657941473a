"""Guardrails: rules over the metrics of a run, and what the run does if one is broken."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any

from rl_core.config import load, tree_to_yaml
from rl_core.errors import RLError
from rl_launch.run_session.config import GuardrailAction, GuardrailConfig
from rl_launch.run_session.directory.run_folder import CONFIG
from rl_launch.run_session.directory.writable import write_atomically

FILE = "guardrails.json"
"""File of the actions, in a run directory."""

FOUND_METRICS = (
    *("reward/mean", "policy/nll", "policy/kl", "policy/clipped", "val/loss", "train/skipped_steps"),
    *("mismatch/kl", "mismatch/effective_sample_size", "rollout/failed", "rollout/truncated"),
    *("idle/trainer", "speculation/tokens_per_step", "speculation/acceptance_rate"),
)
"""Metrics that a rule without a bound can have: findings of `rl show` that guardrails act on are about them first."""

MIN_STEPS = 10
"""Number of steps after which a metric that none of them has is taken for a mistake."""

_log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]

Findings = Callable[[Rows], Sequence[tuple[str, str]]]
"""Returns the findings of `rl show` on the metrics of all steps: the metric of each, and its text."""


@dataclass(frozen=True)
class GuardrailEvent:
    """An action of a guardrail.

    Args:
        rule: Name of the guardrail.
        metric: Metric that broke it.
        action: What the run did.
        step: The step after which it did it.
        onset: The first of the steps in a row that broke the rule.
        reason: The metric with its values, in one line.
        resumes_after: Step of the checkpoint that the run went on from; `step` if it did not go back.
        change: Values that keys of the config have since, by dotted key.
        suspect: Step of a checkpoint that the run went back to by this rule, which broke again in the steps after it;
            None if there is none.
    """

    rule: str
    metric: str
    action: GuardrailAction
    step: int
    onset: int
    reason: str
    resumes_after: int
    change: Mapping[str, Any] = field(default_factory=dict)
    suspect: int | None = None

    def __str__(self) -> str:
        return f"guardrail {self.rule}: {self.reason}"

    @property
    def first_broken(self) -> int:
        """Step of the first weights that broke the rule. Validations and evaluations measure the weights after their
        step, and all other metrics the weights before it."""
        return self.onset if self.metric.startswith(("val/", "eval/")) else self.onset - 1


class GuardrailStop(RLError):
    """Raised if a guardrail ends a run, whose last step is saved."""


class GuardrailRestart(RLError):
    """Raised if a run goes on from a checkpoint with another config.

    Args:
        event: The action.
    """

    def __init__(self, event: GuardrailEvent) -> None:
        super().__init__(str(event))
        self.event = event

    def __reduce__(self) -> tuple[type[GuardrailRestart], tuple[GuardrailEvent]]:
        return type(self), (self.event,)


class Guardrails:
    """Watches the metrics of a run by its rules.

    Args:
        rules: Rules by name, in the order in which they act; one acts after a step at most, apart from warnings.
        run_dir: Run directory, whose earlier actions count.
        findings: See `Findings`.
    """

    def __init__(self, rules: Mapping[str, GuardrailConfig], run_dir: Path, findings: Findings) -> None:
        self._rules = dict(rules)
        self._path = run_dir / FILE
        self._findings = findings
        self._rows: list[Mapping[str, Any]] = []
        self._events = read_events(run_dir) if rules else []
        self._warned: set[str] = set()
        self._unseen, self._seen = set(rules), set[str]()

    def start(self, history: Rows) -> None:
        """Begin with the metrics of earlier steps."""
        self._rows = list(history)
        self._seen.update(*history)

    def after_step(self, step: int, metrics: Mapping[str, Any]) -> GuardrailEvent | None:
        """Return the action that is due after a step, without its change and its checkpoint. Warnings are logged."""
        if not self._rules:
            return None
        self._rows.append({**metrics, "step": step})
        self._seen.update(metrics)
        self._warn_of_unseen()
        for name, rule in self._rules.items():
            broken = self._broken(rule)
            if broken is None:
                self._warned.discard(name)
                continue
            onset, reason = broken
            taken = [each for each in self._events if each.rule == name]
            again = [each.resumes_after for each in taken if each.resumes_after < onset <= each.step]
            suspect = min(again, default=None)
            event = GuardrailEvent(name, rule.metric, rule.action, step, onset, reason, step, suspect=suspect)
            is_spent = rule.action != "stop" and len(taken) >= rule.max_actions
            if rule.action in ("warn", "skip_step") or is_spent:
                if name not in self._warned:
                    self._warned.add(name)
                    times = "once" if len(taken) == 1 else f"{len(taken)} times"
                    spent = f"; it only warns now, because it has acted {times}" if taken else ""
                    _log.warning("%s%s", event, spent)
                continue
            return event
        return None

    def _warn_of_unseen(self) -> None:
        """Warn once of each rule whose metric no step has. It would do nothing without a word."""
        for name in sorted(self._unseen):
            metric = self._rules[name].metric
            kind = metric.partition("/")[0] + "/"
            is_due = len(self._rows) >= MIN_STEPS and (
                kind not in ("val/", "eval/") or any(each.startswith(kind) for each in self._seen)
            )
            if metric in self._seen or is_due:
                self._unseen.remove(name)
            if metric not in self._seen and is_due:
                near = ", ".join(get_close_matches(metric, self._seen, 3)) or "none"
                text = "guardrail %s does nothing: none of %d steps has the metric %s (similar ones: %s)"
                _log.warning(text, name, len(self._rows), metric, near)

    def note(self, event: GuardrailEvent) -> None:
        """Keep an action in the run directory."""
        self._events.append(event)
        write_atomically(self._path, json.dumps([asdict(each) for each in self._events], indent=1) + "\n")

    def _broken(self, rule: GuardrailConfig) -> tuple[int, str] | None:
        """Return the first of the steps in a row that break a rule, and the reason; None if it is kept."""
        if not rule.has_bound:
            return self._found(rule)
        rows = [row for row in self._rows if _number(row.get(rule.metric)) is not None]
        if len(rows) < rule.patience or self._rows[-1] is not rows[-1]:
            return None
        recent, earlier = rows[-rule.patience :], rows[: -rule.patience]
        values = [float(row[rule.metric]) for row in recent]
        windows = [
            fmean(float(row[rule.metric]) for row in rows[end - rule.patience : end])
            for end in range(rule.patience, len(earlier) + 1)
        ]
        bounds = [
            ("above", rule.above, lambda value, bound: value > bound),
            ("below", rule.below, lambda value, bound: value < bound),
        ]
        if windows:
            if rule.falls_by is not None:
                bounds.append(("below", max(windows) - rule.falls_by, lambda value, bound: value < bound))
            if rule.rises_by is not None:
                bounds.append(("above", min(windows) + rule.rises_by, lambda value, bound: value > bound))
        for side, bound, breaks in bounds:
            # A value that is not a number keeps no bound.
            if bound is not None and all(math.isnan(value) or breaks(value, bound) for value in values):
                count = f" in {len(values)} steps in a row" if len(values) > 1 else ""
                reason = f"{rule.metric} was {side} {bound:.4g}{count}, the last time {values[-1]:.4g}"
                return int(recent[0]["step"]), reason
        return None

    def _found(self, rule: GuardrailConfig) -> tuple[int, str] | None:
        onset, reason = 0, ""
        for count in range(rule.patience):
            rows = self._rows[: len(self._rows) - count]
            texts = [text for metric, text in self._findings(rows) if metric == rule.metric] if rows else []
            if not texts:
                return None
            onset, reason = int(rows[-1]["step"]), reason or texts[0]
        return onset, reason


def read_events(run_dir: Path) -> list[GuardrailEvent]:
    """Return the actions of the guardrails of a run, in order.

    Raises:
        RLError: If the file cannot be read.
    """
    path = run_dir / FILE
    try:
        return [GuardrailEvent(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise RLError(
            f"{path} cannot be read ({error}). It has the changes that guardrails have made to the config: restore "
            "it, or remove it to resume the run without them"
        ) from None


def changes_of(events: Sequence[GuardrailEvent]) -> dict[str, Any]:
    """Return the values that actions have given to keys of the config, by dotted key."""
    return {key: value for event in events for key, value in event.change.items()}


def write_changes(run_dir: Path, changes: Mapping[str, Any]) -> None:
    """Write values of keys into the config of a run directory, so that the run resumes with them."""
    path = run_dir / CONFIG
    tree = load(path).plain()
    for key, value in changes.items():
        section, *names = tree, *key.split(".")
        for name in names[:-1]:
            section = section.setdefault(name, {})
        section[names[-1]] = value
    write_atomically(path, tree_to_yaml(tree))


def changed_value(written: Any, value: Any, key: str) -> Any:
    """Return the value that a change gives to a key.

    Args:
        written: Value of the rule: a plain value, or a factor such as `x0.5`.
        value: Present value of the key.
        key: The key, for messages.

    Raises:
        RLError: If a factor is given to something that is not a number.
    """
    factor = factor_of(written)
    if factor is None:
        return written
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RLError(f"a guardrail multiplies {key} by {factor:g}, but its value is {value!r}; give a value instead")
    scaled = value * factor
    return max(round(scaled), 0) if isinstance(value, int) else scaled


def factor_of(written: Any) -> float | None:
    """Return the factor of a text such as `x0.5`; None for any other value."""
    if not isinstance(written, str) or not written.startswith("x"):
        return None
    try:
        factor = float(written.removeprefix("x"))
    except ValueError:
        return None
    return factor if math.isfinite(factor) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
