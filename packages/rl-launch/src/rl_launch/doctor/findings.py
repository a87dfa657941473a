"""Results of the checks, and the report on a recipe that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl_launch.doctor.machine import Machine
from rl_launch.doctor.needs import Needs

Status = Literal["ok", "warning", "missing"]

SCHEMA = 1
"""Version of `Report.as_json`; raised when a key changes its meaning or is removed."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check.

    Args:
        name: Name of the thing that was checked.
        status: `ok`; `warning` if the recipe runs all the same; `missing` if it does not.
        found: The result, in words.
        remedy: What to do, in one sentence; empty if nothing needs to be done.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


Check = Callable[[Machine, Needs], Iterable[Diagnosis]]
"""Function from a machine and the needs of a recipe to findings."""


@dataclass(frozen=True)
class Report:
    """Report on whether a machine can run a recipe.

    Args:
        recipe: Name of the recipe.
        device: Name of the device that it would run on here.
        findings: Findings in the order of the checks.
        place: Where it would run, for the verdict.
    """

    recipe: str
    device: str
    findings: tuple[Diagnosis, ...]
    place: str = "here"

    @property
    def can_run(self) -> bool:
        """True if nothing is missing."""
        return not self.missing

    @property
    def missing(self) -> tuple[Diagnosis, ...]:
        """Findings that keep the recipe from running here."""
        return tuple(finding for finding in self.findings if finding.status == "missing")

    def as_json(self) -> dict[str, Any]:
        """Return `schema` (1), `recipe`, `device`, `can_run`, and `checks`: objects of `name`, `status`, `found`,
        `remedy`."""
        described = {"schema": SCHEMA, "recipe": self.recipe, "device": self.device, "can_run": self.can_run}
        return {**described, "checks": [asdict(finding) for finding in self.findings]}


def examine(machine: Machine, needs: Needs, checks: Mapping[str, Check]) -> Report:
    """Make all checks, by name; one that fails is reported under its name and does not prevent the others."""
    findings: list[Diagnosis] = []
    for name, check in checks.items():
        try:
            findings += list(check(machine, needs))
        except Exception as error:  # noqa: BLE001  # on an unusual machine the other checks are still useful
            found = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(Diagnosis(name, "warning", found, "Try the recipe. It may still run."))
    return Report(needs.recipe, needs.device.name, tuple(findings))
