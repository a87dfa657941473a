"""`rl show`: a run as figures, samples, times and advice."""

from rl_launch.show.report import RunReport, report_of, rollouts_of
from rl_launch.show.terminal import show, show_rollouts

__all__ = ["RunReport", "report_of", "rollouts_of", "show", "show_rollouts"]
