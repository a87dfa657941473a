"""Metrics of a run as PNG images; needs matplotlib."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_launch.show.report import Series


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        ConfigError: If it is not installed; contains the command that installs it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--png needs matplotlib, which is not installed: {install_command('rl-launch[plot]')}")


@dataclass(frozen=True)
class Line:
    """One line of every plot.

    Args:
        label: In the legend; empty for none.
        series: Values by metric.
        members: Series of single runs, which are drawn thinner in the same color.
    """

    label: str
    series: Series
    members: Sequence[Series] = ()


def write_images(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draw every metric that has more than one value, an image for each group of names (`train`, `reward`, ...).

    Args:
        lines: Drawn over one another.
        folder: Made if it does not exist.

    Returns:
        The files written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for line in lines for name in line.series):
        if any(len(line.series.get(name, ())) > 1 for line in lines):
            groups.setdefault(name.partition("/")[0], []).append(name)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, names in groups.items():
        rows = (len(names) + 1) // 2
        figure = Figure(figsize=(10, 2.6 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        for place, name in enumerate(names, start=1):
            axes = figure.add_subplot(rows, min(2, len(names)), place)
            for line in lines:
                points = line.series.get(name, ())
                # A line without points keeps its color and its place in the legend.
                drawn = axes.plot(*_axes_of(points), label=line.label or None)
                for member in line.members if len(line.members) > 1 else ():
                    axes.plot(*_axes_of(member.get(name, ())), color=drawn[0].get_color(), linewidth=0.6, alpha=0.5)
            axes.set_title(name)
            axes.grid(alpha=0.3)
        labelled = [line.label for line in lines if line.label]
        if labelled:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=2)
        path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', group)}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _axes_of(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
