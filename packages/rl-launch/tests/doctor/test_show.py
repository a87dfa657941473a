"""The same report on a terminal and in a log."""

from io import StringIO

from machines import FakeMachine, needs
from rich.console import Console

from rl_launch.doctor.checks import CHECKS
from rl_launch.doctor.findings import Diagnosis, Report, examine
from rl_launch.doctor.show import show

REPORT = Report(
    "some-recipe",
    "cpu",
    (
        Diagnosis("packages of policy", "ok", "rl-dtensor[worker]: built"),
        Diagnosis("shared memory", "missing", "there is no /dev/shm", "Mount one."),
    ),
)


def shown(report, *, on_terminal):
    output = StringIO()
    show(report, Console(file=output, force_terminal=on_terminal, width=60, color_system=None))
    return output.getvalue()


def test_a_terminal_shows_a_table_with_each_remedy_below_what_was_found():
    text = shown(REPORT, on_terminal=True)
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    assert rows == [
        ["packages of policy", "ok", "rl-dtensor[worker]: built"],
        ["shared memory", "missing", "there is no /dev/shm"],
        ["", "", "Mount one."],
    ]
    assert text.splitlines()[-1] == "some-recipe cannot run here: shared memory."


def test_a_log_gets_a_line_for_each_finding():
    assert shown(REPORT, on_terminal=False).splitlines() == [
        "ok       packages of policy: rl-dtensor[worker]: built",
        "missing  shared memory: there is no /dev/shm | Mount one.",
        "some-recipe cannot run here: shared memory.",
    ]


def test_a_machine_that_can_is_told_on_what():
    report = examine(FakeMachine(), needs(), CHECKS)
    lines = shown(report, on_terminal=False).splitlines()
    assert len(lines) == len(report.findings) + 1
    assert lines[-1] == "some-recipe can run here, on the CPU."
