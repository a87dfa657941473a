"""What a machine can run: checks of it against what a recipe needs."""

from rl_launch.doctor.checks import CHECKS
from rl_launch.doctor.findings import Check, Finding, Report, examine
from rl_launch.doctor.machine import Machine
from rl_launch.doctor.needs import Needs, needs_of
from rl_launch.doctor.this_machine import ThisMachine

__all__ = ["CHECKS", "Check", "Finding", "Machine", "Needs", "Report", "ThisMachine", "examine", "needs_of"]
