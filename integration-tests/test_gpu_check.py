"""The GPU check's run of `rl train`, small, with the topology, offload and transports of a GPU."""

from pathlib import Path

import pytest

from rl_core.testing.exhaustive import exhaustive

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@exhaustive
@pytest.mark.timeout(600)
def test_three_steps_of_a_recipe_agree_with_their_oracles(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_check.report import Figures, Finding, Report
    from gpu_check.setup import Setup
    from gpu_check.train import NUM_STEPS, check

    entries = []
    check(Setup("rehearsal", True, tmp_path), Report(entries.append, release=lambda: None))
    findings = [entry for entry in entries if isinstance(entry, Finding)]
    assert [finding for finding in findings if finding.verdict != "ok"] == []
    assert len([finding for finding in findings if "weight version" in finding.subject]) == NUM_STEPS
    profiles = [
        entry.rows for entry in entries if isinstance(entry, Figures) and entry.caption.startswith("Operations")
    ]
    assert len(profiles) == 2
    assert all(rows for rows in profiles)
