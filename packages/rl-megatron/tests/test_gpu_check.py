"""This package's section of the GPU check runs on a CPU, small, with the offload of a GPU."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.testing.exhaustive import exhaustive

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout alone")
def test_the_section_agrees_with_its_oracles(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_check.report import Finding
    from gpu_check.runner import SECTIONS, Runner
    from gpu_check.setup import Setup

    # in a fork of the process that has imported Megatron for the ranks
    with Runner(Setup("rehearsal", True, tmp_path), multiprocessing.get_context("forkserver")) as runner:
        entries = runner.run(SECTIONS["megatron"], 560)
    findings = [entry for entry in entries if isinstance(entry, Finding)]
    assert "digests when saved" in [finding.oracle for finding in findings]
    assert [finding for finding in findings if finding.verdict in ("off", "failed")] == []
    assert not any("cannot be imported" in finding.found for finding in findings)


@exhaustive
@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout alone")
def test_meshes_agree_with_one_process_on_two_ranks(ranks, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_check.meshes import check_backend, megatron
    from gpu_check.report import Finding, Report
    from gpu_check.setup import Setup

    entries = []
    check_backend(
        megatron(), ranks, Setup("cpu", True, tmp_path, num_gpus=2), Report(entries.append, release=lambda: None)
    )
    findings = [entry for entry in entries if isinstance(entry, Finding)]
    assert {finding.subject: finding.verdict for finding in findings} == {
        "rl_megatron, qwen3, tp2+sp, packed, full": "ok",
        "rl_megatron, qwen3_moe, ep2, packed, full": "ok",
    }


@exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout alone")
def test_the_check_of_several_gpus_runs_whole_in_rehearsal():
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--gpus", "2", "--device", "rehearsal", "--only", "meshes"]
    done = subprocess.run([*command, "--budget", "560"], capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rl_megatron, qwen3_moe, ep2, packed, full" in done.stdout
