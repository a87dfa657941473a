"""Environments of a recipe's workers are built ahead, as the ones that its run finds."""

import sys

import pytest
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli import app
from rl_launch.commands.diagnosis import build_worker_envs
from rl_launch.worker_envs.node_build import find_built
from rl_launch.worker_envs.plan import local_plan

ON_CPU = "cluster.device=cpu"


@exhaustive
def test_an_environment_that_was_built_ahead_is_the_one_that_a_run_finds(tmp_path, monkeypatch):
    from rl_launch.doctor.needs import needs_of

    monkeypatch.setenv("RL_HOME", str(tmp_path))
    isolated = ["cluster.worker_envs=isolated", ON_CPU]
    built = build_worker_envs("grpo-math-1b", isolated, roles=["env.math"])
    spec = needs_of("grpo-math-1b", isolated, num_gpus=0).workers["env.math"]
    assert built == {"env.math": find_built(local_plan(spec))}
    assert built["env.math"].startswith(str(tmp_path))


def test_the_command_prints_the_interpreter_of_each_role():
    answer = CliRunner().invoke(app, ["worker-envs", "grpo-math-1b", ON_CPU, "--role", "env.math"])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == f"env.math: {sys.executable}\n"


def test_a_role_that_the_recipe_does_not_have_is_refused_with_those_that_it_has():
    with pytest.raises(ConfigError, match=r"no role 'generation'. Its roles: policy"):
        build_worker_envs("sft-arithmetic", [ON_CPU], roles=["generation"])
