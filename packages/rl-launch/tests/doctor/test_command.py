"""`rl doctor` as it is typed."""

import json
import os
import resource
import subprocess
import sys

import pytest

from rl_core.testing.isolation import loaded_by

HEAVY = {"datasets", "megatron", "ray", "torch", "transformers", "vllm"}
CALLED = """
import sys
from rl_launch.cli import app
try:
    app(["doctor"], standalone_mode=False)
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def doctor(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "rl_launch.cli", "doctor", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_answers_at_once():
    doctor()
    before = cpu_seconds()
    doctor()
    assert cpu_seconds() - before < 3.0


def test_it_starts_no_engine():
    done = subprocess.run([sys.executable, "-c", CALLED], capture_output=True, text=True, check=False)
    assert "grpo-arithmetic" in done.stdout
    assert not set(done.stderr.splitlines()[-1].split()) & HEAVY
    assert not loaded_by("rl_launch.doctor", "rl_launch.doctor.show") & HEAVY


def test_json_says_what_the_lines_say():
    plain, as_json = doctor(), doctor("--json")
    seen = json.loads(as_json.stdout)
    assert plain.returncode == as_json.returncode == (0 if seen["can_run"] else 1)
    assert all(f"{each['status']:<8} {each['name']}: " in plain.stdout for each in seen["checks"])
    assert seen["recipe"] == "grpo-arithmetic"
    assert plain.stdout.splitlines()[-1].startswith("grpo-arithmetic can")


def test_a_recipe_for_gpus_cannot_run_without():
    answer = doctor("grpo-math-1b", "cluster.gpus_per_node=4", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 1
    seen = json.loads(answer.stdout)
    assert not seen["can_run"]
    assert "gpus" in [each["name"] for each in seen["checks"] if each["status"] == "missing"]
    assert not answer.stderr


def test_overrides_alone_change_the_default_recipe():
    assert "for 400 ranks" in doctor("cluster.cpu_ranks_per_node=400", CUDA_VISIBLE_DEVICES="").stdout


def test_a_cluster_that_is_not_there_is_missing():
    answer = doctor(RAY_ADDRESS="127.0.0.1:1")
    assert answer.returncode == 1
    assert "missing  ray: " in answer.stdout
    assert "RAY_ADDRESS is 127.0.0.1:1, and nothing answers there" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonesuch"], "there is no recipe 'nonesuch'"),
        (["grpo.sede=1"], "did you mean grpo.seed?"),
    ],
)
def test_wrong_use_is_one_message(arguments, said):
    answer = doctor(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ")
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


def cpu_seconds():
    """Of the processes that have ended: the time on the clock says how busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
