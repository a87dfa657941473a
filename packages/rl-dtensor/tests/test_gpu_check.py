"""The GPU check runs on a CPU, small, and tells of sections that fail."""

import io
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_core.testing.exhaustive import partly_exhaustive

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SECTIONS = (
    "environment",
    "kernels",
    "attention",
    "head",
    "training",
    "syncs",
    "residency",
    "transfer",
    "generator",
    "resume",
    "forks",
)
LIGHT = ("cpu", ("environment", "kernels", "head"))
"""Sections that need torch alone."""
QUICK = ("syncs", "residency", "generator", "resume")
"""Others that take seconds; the rest runs what the tests of rl-core and of this package run, in larger shapes."""
ON_CPU, IN_REHEARSAL = ("cpu", SECTIONS), ("rehearsal", ("residency", "generator"))

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout alone")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("device", "sections"), partly_exhaustive([LIGHT, ON_CPU, IN_REHEARSAL], always=[LIGHT]))
def test_every_section_agrees_with_its_oracles(device, sections):
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--device", device, "--only", *sections]
    done = subprocess.run([*command, "--budget", "560", "--total", "560"], capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.partition("## summary")[2]
    verdicts = {line.split("|")[1].strip(): line.split("|")[2] for line in summary.splitlines() if line.count("|") > 3}
    for section in sections:
        assert "ok" in verdicts[section] or section == "environment"
    assert "cannot be imported" not in done.stdout


@pytest.fixture
def runner(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_check.runner import Runner
    from gpu_check.setup import Setup

    # forks of a process that has imported torch, of which each section needs a new one here
    with Runner(Setup("cpu", True, tmp_path), multiprocessing.get_context("forkserver")) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", partly_exhaustive(QUICK, always=[]))
def test_quick_sections_of_this_package_agree_with_their_oracles(runner, name):
    from gpu_check.report import Finding
    from gpu_check.runner import SECTIONS

    verdicts = [each.verdict for each in runner.run(SECTIONS[name], 560) if isinstance(each, Finding)]
    assert "ok" in verdicts
    assert not {"off", "failed"} & set(verdicts)


def test_sections_after_one_that_fails_still_run(runner):
    from gpu_check.report import Finding
    from gpu_check.runner import Section

    def found(name, budget_s):
        entries = runner.run(Section(f"gpu_check_sections:{name}", ""), budget_s)
        return [(entry.subject, entry.verdict) for entry in entries if isinstance(entry, Finding)], entries[-1]

    findings, last = found("dies", 120)
    assert findings == [("before", "ok"), ("dying", "failed")]
    assert "ended" in last.found
    assert found("passes", 120)[0] == [("a check", "ok")]  # its process is up, so a budget is for what hangs alone
    findings, last = found("hangs", 5)
    assert findings[-1][1] == "failed"
    assert "budget of 5 s" in last.found
    assert "in hangs" in last.trace
    findings, last = found("raises", 120)
    assert findings == [("a check", "failed"), ("another", "off"), ("all of it", "failed")]
    assert last.found == "ValueError: of the section"
    assert "raises" in last.trace
    assert found("passes", 120)[0] == [("a check", "ok")]


def test_a_section_whose_packages_are_not_there_is_skipped(runner):
    from gpu_check.runner import Section

    (finding,) = runner.run(Section("gpu_check_sections:passes", "", ("json", "no_such.package")), 120)
    assert finding.verdict == "skipped"
    assert "no_such.package" in finding.found


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_measurements_are_printed_beside_what_was_expected(benchmarks):
    from gpu_check.document import Document
    from gpu_check.report import Speed

    out = io.StringIO()
    document = Document(out)
    document.begin("copies", "")
    entries = [
        Speed("within the device", "GB/s", 650.0, 1300.0, "bandwidth"),
        Speed("to the host", "GB/s", 20.0, None, ""),
    ]
    document.end(entries, 1.0)
    document.close()
    lines = out.getvalue().partition("## expected and found")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| copies:")]
    assert cells == [
        ["copies: within the device", "GB/s", "1300", "650", "0.50", "bandwidth"],
        ["copies: to the host", "GB/s", "", "20", "", ""],
    ]


def test_the_expected_step_takes_what_its_products_take_and_what_it_moves(benchmarks, tmp_path):
    from gpu_check.expected import H100, chip_named
    from gpu_check.expected_step import step_seconds
    from gpu_check.setup import SHAPES
    from transformers import Qwen3Config

    assert chip_named("NVIDIA H100 80GB HBM3") == H100
    assert chip_named("") is None
    shape, lengths = SHAPES["0.6B"], np.full(8, 1024)
    Qwen3Config(**shape.fields, tie_word_embeddings=True).save_pretrained(tmp_path)
    device = replace(H100, launch_seconds=0.0, operator_seconds=0.0)
    none, full, with_host = (
        step_seconds(chip, tmp_path, shape, lengths, {"recompute": recompute}, chunk_size=2048)
        for chip, recompute in ((device, "none"), (device, "full"), (H100, "none"))
    )
    least = shape.model.training_flops(lengths) / H100.products
    assert least < none < 3 * least < with_host
    # the layers' products once more, and more bytes
    again = 2 * 8192 * shape.num_layer_weights / H100.products
    assert full - none > again


@pytest.mark.parametrize(
    ("launches", "operators", "device", "found"),
    [
        # Launches of torch and calls of operators in 28 layers and outside of them, for the code that ran on the H100;
        # tokens/s of the device alone, and tokens/s that were found (`benchmarks/results/gpu_check.md`).
        (28 * 92 + 130, 28 * 10 + 10, 82_350, 30_190),
        (28 * 210 + 151, 8, 47_750, 24_920),
    ],
    ids=["fused", "plain"],
)
def test_launches_explain_the_speed_of_a_small_model_on_a_gpu(benchmarks, launches, operators, device, found):
    from gpu_check.expected import H100
    from ledger.phases import overlapped

    host = launches * H100.launch_seconds + operators * H100.operator_seconds
    expected = 8192 / overlapped([(host * share, 8192 / device * share) for share in (1 / 3, 2 / 3)])
    assert 0.75 < found / expected < 1.25


def test_a_device_waits_for_the_launches_that_come_later_and_not_for_those_that_came_before(benchmarks):
    from ledger.phases import overlapped

    assert overlapped([(1.0, 3.0)]) == 3.0
    assert overlapped([(3.0, 1.0)]) == 3.0
    assert overlapped([(3.0, 1.0), (1.0, 3.0)]) == 6.0
    # While the device computes, the host starts what follows.
    assert overlapped([(1.0, 3.0), (3.0, 1.0)]) == 4.0
