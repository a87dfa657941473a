"""Profiles of a process: by several tools, none of which can end what it records."""

import gzip
import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
import torch

from rl_core.tracing.profiling import Profile, ProfileOrder, ProfileReport

STAND_IN = """#!{python}
import signal, sys, time
output = sys.argv[sys.argv.index("--output") + 1]
def write(*_):
    open(output, "w").write(" ".join(sys.argv[1:]))
    sys.exit(0)
signal.signal(signal.SIGINT, write)
open(output + ".ready", "w").close()
time.sleep(60)
"""


def order(folder: Path, *tools: str, **others: str) -> ProfileOrder:
    return ProfileOrder(str(folder / "profiles"), "policy-0", tools, **others)


def program(folder: Path, text: str) -> str:
    path = folder / "py-spy"
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_torch_records_the_operators_between_start_and_stop(tmp_path):
    profile = Profile()
    assert profile.start(order(tmp_path, "torch")) == ProfileReport()
    torch.mm(torch.ones(3, 4), torch.ones(4, 5))
    report = profile.stop()
    assert report.files == (str(tmp_path / "profiles" / "policy-0.torch.json.gz"),)
    trace = json.loads(gzip.decompress(Path(report.files[0]).read_bytes()))
    (product,) = (event for event in trace["traceEvents"] if event.get("name") == "aten::mm")
    assert product["args"]["Input Dims"] == [[3, 4], [4, 5]]
    assert profile.stop() == ProfileReport()


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses what a GPU has")
def test_a_tool_that_fails_is_reported_and_the_others_record(tmp_path):
    profile = Profile()
    begun = profile.start(order(tmp_path, "memory", "torch", "py-spy", py_spy=str(tmp_path / "missing")))
    assert [problem.split(" failed")[0] for problem in begun.problems] == ["policy-0: memory", "policy-0: py-spy"]
    torch.ones(2).sum()
    assert [Path(file).name for file in profile.stop().files] == ["policy-0.torch.json.gz"]


@pytest.fixture(params=[True, False], ids=["signals are blocked", "signals arrive"])
def _signals(request):
    """Threads of an actor with coroutines block signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT] if request.param else [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("_signals")
def test_py_spy_samples_this_process_and_writes_when_it_is_stopped(tmp_path):
    profile = Profile()
    assert profile.start(order(tmp_path, "py-spy", py_spy=program(tmp_path, STAND_IN))) == ProfileReport()
    output = tmp_path / "profiles" / "policy-0.py-spy.json"
    deadline = time.monotonic() + 30
    while not Path(f"{output}.ready").exists():
        assert time.monotonic() < deadline
    report = profile.stop()
    assert report == ProfileReport((str(output),))
    assert f"record --pid {os.getpid()} --format speedscope" in output.read_text()


def test_a_missing_permission_is_one_message_with_its_remedy(tmp_path):
    refused = '#!/bin/sh\necho "Error: Permission Denied: Try running again with elevated permissions" >&2\nexit 1\n'
    report = Profile().start(order(tmp_path, "py-spy", py_spy=program(tmp_path, refused)))
    (problem,) = report.problems
    assert "SYS_PTRACE" in problem
    assert "ptrace_scope" in problem


def test_a_second_start_ends_the_first(tmp_path):
    profile = Profile()
    profile.start(order(tmp_path, "torch"))
    report = profile.start(ProfileOrder(str(tmp_path / "later"), "policy-0", ("torch",)))
    assert [Path(file).parent.name for file in report.files] == ["profiles"]
    assert [Path(file).parent.name for file in profile.stop().files] == ["later"]


def test_ranks_of_an_engine_have_names_of_their_own(tmp_path):
    assert order(tmp_path).of_rank(0, 1).name == "policy-0"
    assert order(tmp_path).of_rank(1, 2).path("torch.json.gz").name == "policy-0-rank1.torch.json.gz"
