"""The files of `clouds`: the scripts of SkyPilot with stand-ins for its commands, and the packages of conda."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SKYPILOT = yaml.safe_load((ROOT / "clouds/skypilot.yaml").read_text())
CONDA = yaml.safe_load((ROOT / "clouds/environment.yml").read_text())


def calls_of(script, tmp_path, rank, num_nodes):
    """Run the script of a node; returns the calls of `ray` and `rl` that it made, and where Ray was then."""
    calls = tmp_path / "calls"
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "activate").write_text(f'PATH="{scripts}:$PATH"\n')
    for name in ("ray", "rl"):
        (scripts / name).write_text(f'#!/bin/sh\necho {name} "$@" "${{RAY_ADDRESS:-}}" >> {calls}\n')
        (scripts / name).chmod(0o755)
    given = {**SKYPILOT["envs"], "RAY_AUTH_TOKEN": "t", "OVERRIDES": "grpo.seed=1 grpo.max_num_steps=2"}
    here = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(num_nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    environment = {"PATH": os.environ["PATH"], **given, **here}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)
    return calls.read_text().splitlines()


TRAIN = "rl train grpo-math-8b cluster.num_nodes={} cluster.gpus_per_node=8 run_dir=runs/grpo-math-8b grpo.seed=1 "


@pytest.mark.parametrize(
    ("rank", "num_nodes", "calls"),
    [
        (0, 1, [TRAIN.format(1) + "grpo.max_num_steps=2 "]),
        (0, 2, ["ray start --head --port=6379 ", TRAIN.format(2) + "grpo.max_num_steps=2 10.0.0.1:6379"]),
        (1, 2, ["ray start --address=10.0.0.1:6379 --block "]),
    ],
)
def test_every_node_does_its_part(tmp_path, rank, num_nodes, calls):
    assert calls_of(SKYPILOT["run"], tmp_path, rank, num_nodes) == calls


def test_the_recipe_exists_and_the_group_of_the_setup_too():
    from rl_launch.run_config.reading import read_plan

    assert read_plan(SKYPILOT["envs"]["RECIPE"]).config.algorithm == "grpo"
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert "--group cuda\n" in SKYPILOT["setup"]
    [pip] = [each["pip"] for each in CONDA["dependencies"] if isinstance(each, dict)]
    assert sorted(each.removeprefix("-e ../packages/") for each in pip) == sorted(groups["cuda"])
    for each in pip:
        assert (ROOT / "packages" / each.removeprefix("-e ../packages/").partition("[")[0]).is_dir()
