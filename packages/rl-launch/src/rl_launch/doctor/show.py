"""A report for people: a table on a terminal, plain lines in a log."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_core.devices import device_named
from rl_launch.doctor.findings import Report

_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}


def show(report: Report, console: Console) -> None:
    """Write a report to the console, as a table or as plain lines."""
    if console.is_terminal:
        console.print(table(report))
        console.print(verdict(report), highlight=False)
    else:
        for line in lines(report):
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def table(report: Report) -> Table:
    """Return a table with a row for each finding, and the remedy below the result."""
    shown = Table(show_edge=False, pad_edge=False)
    for column in ("check", "status", "found"):
        shown.add_column(column, overflow="fold")
    for finding in report.findings:
        found = escape(finding.found) + (f"\n[bold]{escape(finding.remedy)}[/bold]" if finding.remedy else "")
        shown.add_row(finding.name, f"[{_STYLES[finding.status]}]{finding.status}[/]", found)
    return shown


def lines(report: Report) -> Iterator[str]:
    """Yield a line for each finding, and the verdict."""
    for finding in report.findings:
        remedy = f" | {finding.remedy}" if finding.remedy else ""
        yield f"{finding.status:<8} {finding.name}: {finding.found}{remedy}"
    yield verdict(report)


def verdict(report: Report) -> str:
    """Return the verdict in one sentence."""
    if report.can_run:
        device = "GPUs" if device_named(report.device).runs_on_gpus else "the CPU"
        return f"{report.recipe} can run {report.place}, on {device}."
    return f"{report.recipe} cannot run {report.place}: {', '.join(finding.name for finding in report.missing)}."
