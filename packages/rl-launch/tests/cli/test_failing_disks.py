"""A run on a disk that fails while it proceeds: one message, and the same steps after a resume."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from failing_disk import FailingDisk

from rl_core.errors import RLError
from rl_launch.cli.failure import reported

ERRORS = {
    errno.ENOSPC: "no space left on a disk",
    errno.EDQUOT: "a disk quota is exceeded",
    errno.EIO: "a disk failed to read or write",
    errno.EROFS: "a file system is read-only",
    errno.ESTALE: "a network file system has lost a file",
    errno.EACCES: "access to a file was denied",
}

RUNS = """
import logging, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import typer, counting_run as counting
from rl_launch.cli.failure import reported
from rl_launch.run_session import LoggerConfig

folder, orders = Path(sys.argv[2]), Path(sys.argv[3])
settings = counting.config().model_copy(update={"logger": LoggerConfig()})
counting.run(folder / "whole", settings)
for number in map(int, sys.argv[4:]):
    for operations in ("write,sync", "write,sync,create"):
        run_dir = folder / f"{number}-{operations}"

        def fail(session, step):
            if step == 5:
                orders.write_text(f"{number} {operations} {run_dir}\\n")
                for _ in range(20):
                    logging.getLogger("rl_launch").warning("a record of the log")

        sys.stderr.write(f"# run {number}\\n")
        try:
            with reported() as failure:
                failure.run_dir = run_dir
                counting.run(run_dir, settings, at_step=fail)
        except typer.Exit as ended:
            sys.stderr.write(f"code {ended.exit_code}\\n")
        orders.unlink()
        counting.run(run_dir, settings)
        assert counting.metrics(run_dir) == counting.metrics(folder / "whole")
"""


def test_a_disk_that_refuses_writes_ends_a_run_with_one_message_and_a_resume_is_whole(tmp_path):
    disk = FailingDisk(tmp_path)
    (tmp_path / "runs").mkdir()
    session = Path(__file__).parents[1] / "session"
    command = [sys.executable, "-c", RUNS, session, tmp_path / "runs", tmp_path / "orders", *map(str, ERRORS)]
    found = subprocess.run(
        command, env={**os.environ, **disk.variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    runs = found.stderr.split("# run ")[1:]
    assert len(runs) == 2 * len(ERRORS)
    for said, number in zip(runs, [each for each in ERRORS for _ in range(2)], strict=True):
        lines = [line for line in said.splitlines() if "a record of the log" not in line]
        assert "Traceback" not in said
        assert len(lines) < 15, said
        [error] = [line for line in lines if line.startswith("error: ")]
        assert error.startswith(f"error: {ERRORS[number]}, most likely the disk of {tmp_path / 'runs'}")
        assert error.endswith("run the same command again to resume from the newest checkpoint.")
        assert f"{os.strerror(number)}: '{tmp_path / 'runs'}" in said
        assert "metrics.jsonl'" in said
        assert lines[-2:] == ["in step 5 of 6", "code 1"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO), "/data/metrics.jsonl"), "a disk failed to read or write, most "),
        (RLError("policy rank 0: the checkpoint was not read: [Errno 5] Input/output error"), "a disk failed to read"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/x"), "access to a file was denied, most "),
    ],
)
def test_a_command_that_a_disk_fails_prints_no_traceback(error, said, capsys):
    with pytest.raises(typer.Exit), reported():
        raise error
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {said}")
    assert "Traceback" not in shown
    assert getattr(error, "filename", None) is None or f"the one of {error.filename}" in shown


def test_a_denied_connection_is_not_a_denied_file(capsys):
    with pytest.raises(typer.Exit), reported():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert "Traceback" in capsys.readouterr().err
