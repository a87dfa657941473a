"""Processes of ranks end with their time, or with the process that started them."""

import subprocess
import sys

import psutil

from rl_launch.doctor.cluster.node_probe import NodeProbe

run_ranks = NodeProbe("127.0.0.1").run_ranks
PYTHON = [sys.executable, "-c"]


def test_each_rank_has_its_argument_its_gpu_and_the_variables(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("REMOVED", "x")
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OWN'], 'REMOVED' in os.environ)"
    found = run_ranks([*PYTHON, code], ["a", "b"], {"OWN": "y", "REMOVED": ""}, 60)
    assert [(end.code, end.output) for end in found] == [(0, "4 y False\n"), (0, "5 y False\n")]


def test_a_rank_that_fails_says_why_and_one_that_hangs_is_killed():
    code = "import sys, time\nif sys.argv[1] == 'bad': sys.exit('first\\nlast')\ntime.sleep(100)"
    bad, hanging = run_ranks([*PYTHON, code], ["bad", "hangs"], {}, 2)
    assert (bad.code, bad.error) == (1, "last")
    assert hanging.code is None
    assert not [child for child in psutil.Process().children() if "hangs" in child.cmdline()]


def test_ranks_see_the_end_of_a_process_that_is_killed():
    rank = "import sys; print('started', flush=True); sys.stdin.read()"
    code = (
        "import sys; from rl_launch.doctor.cluster.node_probe import NodeProbe; "
        f"NodeProbe('').run_ranks([sys.executable, '-c', {rank!r}], ['rank'], {{}}, 100)"
    )
    with subprocess.Popen([*PYTHON, code]) as parent:
        process = psutil.Process(parent.pid)
        while not (children := process.children()):
            assert parent.poll() is None
        parent.kill()
    _, alive = psutil.wait_procs(children, 30)
    assert not alive
