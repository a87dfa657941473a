"""Processes of ranks that a node runs together, with the standard library."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's process.

    Args:
        code: Its exit code; None if it was ended after the time limit.
        output: Its standard output.
        error: Last line of its standard error.
    """

    code: int | None
    output: str
    error: str


def run_ranks(
    command: Sequence[str], ranks: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> list[RankEnd]:
    """Run a process for each rank, and wait for all of them. Their standard inputs are closed when this process ends.

    Args:
        command: Command of all ranks.
        ranks: Last argument of each. Each also sees one of the GPUs that this process sees.
        variables: Environment variables that differ from those of this process; an empty one is removed.
        timeout_s: Time in seconds after which they are killed.
    """
    gpus = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    base = {name: text for name, text in {**os.environ, **variables}.items() if text}
    end, found = time.monotonic() + timeout_s, []
    with ExitStack() as held:
        processes = []
        for rank, argument in enumerate(ranks):
            own = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if rank < len(gpus) else {}
            # in files: nobody reads pipes while they run
            output, errors = (held.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
            process = held.enter_context(
                subprocess.Popen(
                    [*command, argument], env=base | own, stdin=subprocess.PIPE, stdout=output, stderr=errors
                )
            )
            held.callback(process.kill)
            processes.append((process, output, errors))
        for process, output, errors in processes:
            code: int | None = None
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
            lines = [line.strip() for line in texts[1].splitlines() if line.strip()]
            found.append(RankEnd(code, texts[0], lines[-1] if lines else ""))
    return found
