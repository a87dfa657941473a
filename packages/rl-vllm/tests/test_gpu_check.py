"""This package's sections of the GPU check run on a CPU, small, with the turns of a GPU."""

import multiprocessing
from pathlib import Path

import pytest

from rl_core.testing.exhaustive import exhaustive

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", ["engine", "quantised"])
@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout alone")
def test_the_section_agrees_with_its_oracles(tmp_path, monkeypatch, section):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_check.uninstalled import offer

    offer(sorted(BENCHMARKS.parent.glob("packages/rl-*")))
    from gpu_check.report import Finding
    from gpu_check.runner import SECTIONS, Runner
    from gpu_check.setup import Setup

    with Runner(Setup("rehearsal", True, tmp_path), multiprocessing.get_context("forkserver")) as runner:
        entries = runner.run(SECTIONS[section], 560)
    findings = [entry for entry in entries if isinstance(entry, Finding)]
    assert [finding for finding in findings if finding.verdict in ("off", "failed")] == []
    assert "the sender's" in [finding.oracle for finding in findings]
    assert not any("cannot be imported" in finding.found for finding in findings)
