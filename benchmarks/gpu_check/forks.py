"""Workers that a fork server starts: their device is theirs, and computes as in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from gpu_check.report import Report
from gpu_check.setup import Setup
from rl_core.fork_server import command

MODULE = "rl_dtensor.worker"

_CODE = """
import json, os, sys, torch
import rl_dtensor.worker
torch.manual_seed(0)
a = torch.randn(256, 256).to(sys.argv[1])
print(json.dumps({"product": (a @ a).sum().item(), "parent": os.getppid(), "device": str(a.device)}))
"""


def check(setup: Setup, report: Report) -> None:
    """Fork twice in a row, next to a plain process."""
    with report.attempt("forks of one server"), tempfile.TemporaryDirectory(dir="/tmp") as folder:
        times, found = [], []
        for head in ([sys.executable], *[command(sys.executable, [MODULE])] * 3):
            started = time.perf_counter()
            answer, errors = _run([*head, "-c", _CODE, str(setup.kind.torch_device)], folder)
            times.append(time.perf_counter() - started)
            found.append(answer)
            report.holds("the process", "no error", not errors, errors or "none")
        plain, *forks = found
        report.holds(
            "forks", "one server", len({each["parent"] for each in forks}) == 1, f"{[each['parent'] for each in forks]}"
        )
        products = [each["product"] for each in found]
        report.holds("product on the device", "a plain process", len(set(products)) == 1, f"{products}")
        report.holds(
            "device", "the one asked for", all(each["device"] == plain["device"] for each in forks), plain["device"]
        )
        report.figures(
            "seconds of a process",
            ("plain", "the first fork", "another"),
            [(f"{times[0]:.2f}", f"{times[1]:.2f}", f"{times[-1]:.2f}")],
        )


def _run(line: list[str], folder: str) -> tuple[dict[str, Any], str]:
    variables = {**os.environ, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=140, check=True)
    refusals = [text for text in done.stderr.splitlines() if "fork server" in text]
    return json.loads(done.stdout.splitlines()[-1]), "\n".join(refusals)
