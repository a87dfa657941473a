"""Findings as Markdown."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Sequence
from typing import TextIO

from measurement import table

from gpu_check.report import Entry, Figures, Finding, Speed


class Document:
    """Prints each section as it ends, then a summary and the tracebacks.

    Args:
        out: stream to print to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._summary: list[tuple[str, str, str]] = []
        self._traces: list[tuple[str, Finding]] = []
        self._speeds: list[tuple[str, Speed]] = []
        self._section = ""
        self.is_clean = True

    def title(self, arguments: Sequence[str]) -> None:
        """Add the heading, with the command that repeats the check."""
        command = shlex.join(["python", "benchmarks/gpu_check.py", *arguments])
        self._print(f"# GPU check\n\n`{command}` on {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}")

    def begin(self, name: str, about: str) -> None:
        """Add the heading of a section."""
        self._section = name
        self._print(f"\n## {name}\n\n{about}")

    def end(self, entries: Sequence[Entry], seconds: float) -> None:
        """Add a section's findings and measurements."""
        findings = [entry for entry in entries if isinstance(entry, Finding)]
        verdict = _verdict_of(findings)
        self._summary.append((self._section, verdict, f"{seconds:.0f}"))
        self._traces += [(self._section, finding) for finding in findings if finding.trace]
        self._speeds += [(self._section, entry) for entry in entries if isinstance(entry, Speed)]
        self.is_clean = self.is_clean and not any(finding.verdict in ("off", "failed") for finding in findings)
        self._print(f"\n**{verdict}**, {seconds:.0f} s\n")
        rows = [(_cell(f.subject), _cell(f.oracle), f.verdict, _cell(f.found)) for f in findings]
        if rows:
            self._print(table(["check", "against", "verdict", "found"], rows))
        for figures in (entry for entry in entries if isinstance(entry, Figures)):
            self._print(f"\n{figures.caption}\n\n{table(figures.head, figures.rows)}")

    def close(self) -> None:
        """Add the expected values, the summary and the appendix."""
        if self._speeds:
            head = ["", "unit", "expected", "found", "found / expected", "expected from"]
            self._print("\n## expected and found\n\n" + table(head, [_row(*each) for each in self._speeds]))
        self._print("\n## summary\n\n" + table(["section", "verdict", "s"], self._summary))
        if self._traces:
            self._print("\n## appendix: tracebacks")
        for section, finding in self._traces:
            self._print(f"\n{section}, {finding.subject}:\n\n```\n{finding.trace.strip()}\n```")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _verdict_of(findings: Sequence[Finding]) -> str:
    counts = {
        verdict: sum(finding.verdict == verdict for finding in findings)
        for verdict in ("failed", "off", "ok", "skipped")
    }
    said = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return ", ".join(said) or "nothing was checked"


def _row(section: str, speed: Speed) -> tuple[str, ...]:
    expected = "" if speed.expected is None else f"{speed.expected:.4g}"
    ratio = "" if speed.expected is None else f"{speed.found / speed.expected:.2f}"
    return f"{section}: {speed.subject}", speed.unit, expected, f"{speed.found:.4g}", ratio, speed.basis


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]
