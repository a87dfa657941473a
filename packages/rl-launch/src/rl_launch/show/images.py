"""Metrics of a run as PNG images; needs matplotlib."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_launch.show.report import Report


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        ConfigError: with the command that installs it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--png needs matplotlib, which is not installed: {install_command('rl-launch[plot]')}")


def write_images(report: Report, folder: Path) -> list[Path]:
    """Draw every metric that has more than one value, an image for each group of names (`train`, `reward`, ...).

    Args:
        report: whose metrics are drawn.
        folder: made if it does not exist.

    Returns:
        The files written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, list[str]] = {}
    for name, points in report.series.items():
        if len(points) > 1:
            groups.setdefault(name.partition("/")[0], []).append(name)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, names in groups.items():
        rows = (len(names) + 1) // 2
        figure = Figure(figsize=(10, 2.6 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        for place, name in enumerate(names, start=1):
            axes = figure.add_subplot(rows, min(2, len(names)), place)
            steps, values = zip(*report.series[name], strict=True)
            axes.plot(steps, values)
            axes.set_title(name)
            axes.grid(alpha=0.3)
        path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', group)}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written
