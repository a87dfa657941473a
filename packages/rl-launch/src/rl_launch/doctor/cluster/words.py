"""Words of findings: sizes, rates, and nodes with the same problem in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rl_launch.doctor.findings import Finding, Status


def grouped(subject: str, problems: Mapping[str, str], status: Status, remedy: str) -> Iterator[Finding]:
    """Yield a finding for each different problem, which names its nodes.

    Args:
        subject: Beginning of the name of the finding.
        problems: Problems by node.
        status: Status of the findings.
        remedy: Remedy of the findings.
    """
    for text in dict.fromkeys(problems.values()):
        names = [name for name, found in problems.items() if found == text]
        yield Finding(f"{subject} {', '.join(names)}", status, text, remedy)


def size(num_bytes: float) -> str:
    """Return a number of bytes in words, such as `1.5 GiB`."""
    gib = num_bytes / 2**30
    return f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.0f} MiB"


def rate(bytes_per_s: float) -> str:
    """Return a rate in words, such as `9.4 Gbit/s`."""
    gigabits = bytes_per_s * 8 / 1e9
    return f"{gigabits:.0f} Gbit/s" if gigabits >= 10 else f"{gigabits:.2g} Gbit/s"
