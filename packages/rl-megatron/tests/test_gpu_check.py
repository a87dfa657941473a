"""This package's section of the GPU check runs on a CPU, small, with the offload of a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.timeout(600)
@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout alone")
def test_the_section_agrees_with_its_oracles():
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--device", "rehearsal", "--only", "megatron"]
    done = subprocess.run([*command, "--budget", "560", "--total", "560"], capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "digests when saved" in done.stdout
    assert "cannot be imported" not in done.stdout
