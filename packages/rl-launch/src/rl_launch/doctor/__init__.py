"""`rl doctor`: checks of a machine against the needs of a recipe."""

from rl_launch.doctor.checks import CHECKS
from rl_launch.doctor.findings import Check, Diagnosis, Report, examine
from rl_launch.doctor.machine import Machine
from rl_launch.doctor.needs import Needs, needs_of

__all__ = ["CHECKS", "Check", "Diagnosis", "Machine", "Needs", "Report", "examine", "needs_of"]
