"""Environments of a run tried before it starts, in the driver's environment or in one that was built for them."""

import logging
import sys

import pytest

from rl_core.errors import ConfigError
from rl_core.user_code import FromFile
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.role_envs import load_agent_in, trials_of, try_here, try_in

RECIPE = """
defaults: grpo-arithmetic
data:
  train: [{data_path: ROWS, env_name: "reward.py:score"}, {data_path: ROWS, env_name: strict}]
  validation: null
grpo: {val_period: 0}
checkpointing: {metric_name: null}
env: {strict: {type: math, answer_format: numeric}}
"""


@pytest.fixture
def trials(tmp_path):
    def make(reward):
        (tmp_path / "reward.py").write_text(reward)
        (tmp_path / "rows.jsonl").write_text('{"messages": "1+2=", "answer": "3"}\n' * 4)
        recipe = tmp_path / "run.yaml"
        recipe.write_text(RECIPE.replace("ROWS", str(tmp_path / "rows.jsonl")))
        plan = read_plan(recipe)
        return trials_of(plan, plan.algorithm.load(plan.config))

    return make


def test_every_environment_is_tried_on_the_first_rows_of_its_datasets(trials, tmp_path):
    found = trials("def score(response, answer):\n    return 1.0\n")
    assert [trial.instance.label for trial in found] == ["reward.py:score", "strict"]
    places = [attempt.place for attempt in found[0].attempts]
    assert sorted(set(places)) == [f"{tmp_path}/rows.jsonl, line {line}" for line in (1, 2)]
    assert try_here(found, "auto") == []


def test_what_the_driver_cannot_run_is_tried_in_its_own_environment(trials, tmp_path):
    found = trials("def score(response):\n    return None\n")[:1]
    assert try_here(found, "isolated") == found
    # which may be on a node that does not have the file
    (tmp_path / "reward.py").unlink()
    with pytest.raises(ConfigError, match=r"reward\.py:score \(reward\.py:1\): the reward is None"):
        try_in({f"env.{found[0].instance.name}": sys.executable}, found)


def test_a_reward_that_raises_on_some_responses_is_a_warning(trials, caplog):
    found = trials("def score(response):\n    return float(response[0] == '3')\n")[:1]
    with caplog.at_level(logging.WARNING, logger="rl_launch"):
        assert try_here(found, "auto") == []
    [warning] = caplog.messages
    assert "raised IndexError: string index out of range (at reward.py:2)" in warning


def test_an_agent_is_imported_where_rollout_workers_would(tmp_path):
    (tmp_path / "agent.py").write_text("import client_of_mine\n\ndef run(base_url, api_key, prompt): ...\n")
    agent = FromFile.read(f"{tmp_path}/agent.py:run")
    refused = r"grpo\.agent\.run: agent\.py:run .*client_of_mine.*grpo\.agent\.env\.PYTHONPATH"
    with pytest.raises(ConfigError, match=refused):
        load_agent_in("grpo.agent", sys.executable, agent, {})
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "client_of_mine.py").touch()
    load_agent_in("grpo.agent", sys.executable, agent, {"PYTHONPATH": f"{tmp_path}/packages"})
