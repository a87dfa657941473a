"""Seconds that `rl train` takes to refuse each case of bad input, as real commands. Budget: 2 s, quiet machine.

usage: bad_input.py [WORD ...]     the cases whose names hold one of the words; all where none is given
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bad_input_cases import CASES as BAD_INPUT
from bad_input_cases import Case
from broken_data_cases import CASES as BROKEN_DATA

CASES = (*BAD_INPUT, *BROKEN_DATA)

BUDGET_S = 2.0
SURROUNDINGS = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


@dataclass(frozen=True)
class Refusal:
    """How a case ended.

    Args:
        wall_s, cpu_s: of the command, without the preparation of its files.
        said: on standard error.
    """

    case: Case
    code: int
    wall_s: float
    cpu_s: float
    said: str

    @property
    def is_right(self) -> bool:
        """Whether it is the one message that was wanted."""
        is_one = self.code == 2 and self.said.startswith("error: ") and self.said.count("error: ") == 1
        return is_one and bool(re.search(self.case.message, self.said, re.DOTALL))


def refusal(case: Case, folder: Path) -> Refusal:
    """Run a case in a folder of its own."""
    os.chdir(folder)
    kept = case.files(folder)
    command = [sys.executable, "-m", "rl_launch.cli", "train", *case.arguments]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    del kept
    return Refusal(case, process.returncode, wall_s, used.ru_utime + used.ru_stime, said.strip())


def main(words: list[str]) -> int:
    """Print a line for every case and the slowest; the number of cases that ended in another way than they should."""
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    refusals = []
    with tempfile.TemporaryDirectory() as base:
        os.environ.update(SURROUNDINGS, RL_HOME=f"{base}/home")
        os.environ.pop("RAY_ADDRESS", None)
        for number, case in enumerate(chosen):
            folder = Path(base, str(number))
            folder.mkdir()
            done = refusal(case, folder)
            refusals.append(done)
            verdict = "" if done.is_right else "  WRONG"
            print(f"{done.code}  {done.wall_s:5.2f} s wall  {done.cpu_s:5.2f} s CPU  {case.name}{verdict}")
            print(f"       {done.said.removeprefix('error: ')}", flush=True)
        os.chdir("/")
    slowest, dearest = max(refusals, key=lambda r: r.wall_s), max(refusals, key=lambda r: r.cpu_s)
    wrong = [done for done in refusals if not done.is_right]
    late = [done for done in refusals if done.wall_s > BUDGET_S]
    print(f"\n{len(refusals)} cases, {len(wrong)} wrong, {len(late)} over {BUDGET_S:.0f} s")
    print(
        f"slowest: {slowest.wall_s:.2f} s ({slowest.case.name}); most CPU: {dearest.cpu_s:.2f} s ({dearest.case.name})"
    )
    return len(wrong)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
