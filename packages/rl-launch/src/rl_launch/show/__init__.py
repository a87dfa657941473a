"""`rl show`: a run as figures, samples, times and advice."""

from rl_launch.show.report import RunReport, report_of
from rl_launch.show.terminal import show

__all__ = ["RunReport", "report_of", "show"]
