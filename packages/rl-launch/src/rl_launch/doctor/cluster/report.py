"""The report on a cluster: findings, and the results that they are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_launch.doctor.cluster.survey import Survey
from rl_launch.doctor.findings import Report


@dataclass(frozen=True)
class ClusterReport:
    """Report on whether a cluster can run a recipe.

    Args:
        report: Findings, and whether the recipe can run.
        survey: Results of the probes.
    """

    report: Report
    survey: Survey

    def as_json(self) -> dict[str, Any]:
        """The keys of `Report.as_json` and of `Survey.as_json`."""
        return {**self.report.as_json(), **self.survey.as_json()}
