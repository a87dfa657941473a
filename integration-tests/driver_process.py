"""Runs and commands one after another in one process and one Ray: most of a short run is their start."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl_core.usage.garbage import collect_seldom


@dataclass(frozen=True)
class CommandResult:
    code: int
    output: str


class DriverProcess:
    """A process that calls `rl_launch.train` and commands of `rl` in one Ray.

    Args:
        log: File of its terminal output.
        cluster: Keys of `cluster` in which its Ray differs from the one of `sft-arithmetic`.
        variables: Further environment variables.
    """

    def __init__(self, log: Path, *cluster: str, **variables: str) -> None:
        self._command = [sys.executable, __file__, *cluster]
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._environment = inherited | variables
        self._log = log
        self._process = self._started()

    def train(self, folder: Path, recipe: str, *overrides: str) -> None:
        """Train in a folder, or resume the run in it."""
        failure = self.failure_of(folder, recipe, *overrides)
        assert not failure, failure

    def failure_of(self, folder: Path, recipe: str, *overrides: str) -> str:
        """Return the traceback of such a run; empty if it succeeds."""
        failure: str = self._answer(train=[recipe, *overrides, f"run_dir={folder}"])
        return failure

    def rl(self, *arguments: str) -> CommandResult:
        """Run a command of `rl`; returns its exit code and output."""
        output = self._log.with_name("output")
        code: int = self._answer(rl=arguments, output=str(output))
        return CommandResult(code, output.read_text())

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(120) == 0, self._log.read_text()
        self._process.stdout.close()

    def _answer(self, **request):
        if self._process.poll() is not None:  # its end has failed one test, and need not fail the others
            self._process = self._started()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()
        return json.loads(answer)

    def _started(self) -> subprocess.Popen:
        with self._log.open("a") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=self._environment,
            )


def main() -> None:
    """Answer every line of standard input: a run with its traceback, a command with its exit code."""
    from rl_launch.cluster.device import resolve_device
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.run_config.reading import read_plan

    # answers have a pipe of their own: whatever else is printed goes to the log
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    cluster = read_plan("sft-arithmetic", sys.argv[1:]).config.cluster
    with VirtualCluster.of(cluster, resolve_device(cluster)):
        for line in sys.stdin:
            request = json.loads(line)
            answer = failure_of(*request["train"]) if "train" in request else exit_code_of(**request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def failure_of(recipe: str, *overrides: str) -> str:
    """The traceback of a run; empty if it succeeds."""
    from rl_launch import train

    try:
        train(recipe, overrides)
    except Exception:  # noqa: BLE001  # a failure is the answer
        return traceback.format_exc()
    return ""


def exit_code_of(rl: list[str], output: str) -> int:
    """The exit code of a command, whose output goes to a file."""
    from rl_launch.cli import app

    with printed_to(output):
        try:
            app(rl, prog_name="rl")
        except SystemExit as ended:
            return int(ended.code or 0)
        except Exception:  # noqa: BLE001  # as the interpreter ends a command
            traceback.print_exc()
            return 1
    return 0


@contextmanager
def printed_to(path: str) -> Iterator[None]:
    """Context in which both output streams of this process are a file."""
    streams = [stream.fileno() for stream in (sys.stdout, sys.stderr)]
    kept = [os.dup(stream) for stream in streams]
    with open(path, "w") as file:
        for stream in streams:
            os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in zip(streams, kept, strict=True):
            os.dup2(before, stream)
            os.close(before)


if __name__ == "__main__":
    collect_seldom()  # as in `rl`
    main()
