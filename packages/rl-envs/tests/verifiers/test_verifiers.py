"""The environment `verifiers` without the package: agents that a test writes play in its place."""

import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core import Conversation, EnvironmentFailure
from rl_core.errors import ConfigError
from rl_core.rollouts.environment import AGENT_FAILURE, AGENT_OUTPUT, AgentRun, UnusableAnswer, this_network
from rl_core.user_code import FromFile
from rl_envs.verifiers import dataset
from rl_envs.verifiers.agent import MAX_VALUES, values_of
from rl_envs.verifiers.environment import MAX_OUTPUT, VerifiersEnvironment
from rl_envs.verifiers.imports import importable_id
from rl_envs.verifiers.plugin import VerifiersConfig

AGENT = """
import os, signal, time

async def run(base_url, api_key, prompt):
    task = prompt["info"]["task"]
    print("plays", task)
    if task == "raises":
        raise LookupError("no words")
    if task == "exits":
        os._exit(3)
    if task == "ends silently":
        print("x" * 10**6, flush=True)
        os._exit(0)
    if task == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "hangs":
        while True:
            time.sleep(1)
    if task == "is a game":
        return {"agents": {"a": {"reward": 1.0}, "b": {"reward": -1.0}}}
    return {"reward": 0.5, "address": float(base_url == "http://127.0.0.1:9/rollouts/r/v1" and api_key == "key")}
"""


def run_at(url="http://127.0.0.1:9/rollouts/r", network=None):
    return AgentRun((), {}, {}, url, "key", network=this_network() if network is None else network)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    function = FromFile.read(f"{file}:run")
    monkeypatch.setattr(VerifiersEnvironment, "_agent", lambda self, taskset: function)
    return VerifiersEnvironment(VerifiersConfig())


def begun(task, id="p", agent=None):
    info = {"taskset": {"id": "t"}, "task": task}
    return Conversation(id, (), info, "", agent_run=agent or run_at())


def ended(environment, asked, limit_s=60.0):
    """The answers to conversations that have all ended."""
    results, end = environment.step(asked, [None] * len(asked)), time.monotonic() + limit_s
    while not all(isinstance(each, EnvironmentFailure) or each.done for each in results):
        assert time.monotonic() < end
        time.sleep(0.02)
        results = [
            each if isinstance(each, EnvironmentFailure) or each.done else environment.step([one], [each.state])[0]
            for one, each in zip(asked, results, strict=True)
        ]
    return results


def test_the_rewards_are_those_of_the_agent_and_each_failure_costs_its_own_rollout(environment):
    tasks = ("is won", "raises", "exits", "ends silently", "is killed", "is a game")
    won, raised, exited, silent, killed, game = ended(environment, [begun(task, id=task) for task in tasks])
    assert won.rewards() == {"reward": 0.5, "address": 1.0}
    assert "LookupError: no words" in raised.info[AGENT_FAILURE]
    assert "plays raises" in raised.info[AGENT_OUTPUT]
    assert "output.log" not in raised.info[AGENT_FAILURE], "the log is reported, not where it was"
    assert "ended with status 3" in exited.info[AGENT_FAILURE]
    assert silent.info[AGENT_FAILURE] == "its process ended before it gave a reward"
    assert len(silent.info[AGENT_OUTPUT]) <= MAX_OUTPUT
    assert (type(killed), killed.fault) == (EnvironmentFailure, "process")
    assert game.agent_rewards == {"a": {"reward": 1.0}, "b": {"reward": -1.0}}


def test_a_task_that_hangs_is_ended_when_its_rollout_is_closed(environment):
    [result] = environment.step([begun("hangs")], [None])
    time.sleep(0.5)
    environment.close([result.state])
    [won] = ended(environment, [begun("is won", id="q")])
    assert won.rewards()["reward"] == 0.5
    [closed] = environment.step([begun("hangs")], [result.state])
    assert closed.fault == "process"


def test_a_taskset_that_cannot_be_imported_fails_its_rollouts():
    [result] = ended(VerifiersEnvironment(VerifiersConfig()), [begun({}, agent=run_at())])
    assert "the agent cannot be loaded: " in result.info[AGENT_FAILURE]


def test_a_policy_on_another_node_needs_an_address(environment):
    [result] = ended(environment, [begun("is won", agent=run_at(network="elsewhere"))])
    assert "set agent.host" in result.info[AGENT_FAILURE]
    [result] = ended(environment, [begun("is won", agent=run_at("http://10.0.0.9:9/rollouts/r", "elsewhere"))])
    assert result.rewards() == {"reward": 0.5, "address": 0.0}


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (Conversation("p", (), {"taskset": {}, "task": {}}, "4"), "set `agent: {place: environment}`"),
        (Conversation("p", (), {"answer": 4}, "", agent_run=run_at()), "lacks .'task', 'taskset'."),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_remedy(environment, conversation, reason):
    with pytest.raises(UnusableAnswer, match=reason):
        environment.step([conversation], [None])


@dataclass
class Reward:
    value: float


def trace(metrics: dict[str, Any], **rewards: float | None) -> Any:
    named = {name: None if value is None else Reward(value) for name, value in rewards.items()}
    total = sum(each.value for each in named.values() if each is not None)
    return SimpleNamespace(metrics=metrics, rewards=named, reward=total)


def test_values_are_means_over_the_traces_of_an_agent_and_the_total_keeps_its_name():
    first, second = trace({"turns": 2, "late": None}, right=1.0, reward=0.25), trace({"turns": 4}, right=0.0)
    assert values_of([first, second]) == {"reward": 0.625, "right": 0.5, "turns": 3.0}
    many = values_of([trace({f"{number:03}" * 50: 1.0 for number in range(200)}, right=1.0)])
    assert len(many) == MAX_VALUES
    assert many["reward"] == 1.0
    assert max(map(len, many)) == 100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match=r"the taskset gave .* it must be a finite number"):
        values_of([trace({}, right=value)])


def test_ids_may_be_files_and_dotted_names(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    for name in ("my_tasks.py", "json.py", "my-tasks.py"):
        (tmp_path / name).write_text("VALUE = 3\n")
    assert importable_id(str(tmp_path / "my_tasks.py")) == "my_tasks"
    assert sys.modules.pop("my_tasks").VALUE == 3
    # Servers of tools are started as `python -m my_tasks`.
    assert os.environ["PYTHONPATH"] == f"before:{tmp_path}"
    with pytest.raises(ImportError, match="has the name of another module"):
        importable_id(str(tmp_path / "json.py"))
    with pytest.raises(ImportError, match="small letters"):
        importable_id(str(tmp_path / "my-tasks.py"))
    assert sys.modules[importable_id("rl_envs.verifiers.plugin")].VerifiersConfig is VerifiersConfig
    assert importable_id("textarena") == "textarena"
    with pytest.raises(ImportError, match="is not a file"):
        importable_id(str(tmp_path / "missing.py"))


def test_the_dataset_needs_the_package(monkeypatch):
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"verifiers is not installed: .*rl-envs\[verifiers\]"):
        dataset.load({"id": "textarena"}, "train")


def test_rows_show_what_a_task_begins_with():
    begins = dataset._messages
    assert begins({"prompt": "1+2=", "system_prompt": "Add."}) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2="},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert begins({"prompt": [{"role": "user", "content": parts}]}) == [{"role": "user", "content": "ab"}]
    assert begins({"idx": 3}) == [{"role": "user", "content": "task 3"}]
    with pytest.raises(ValueError, match="task 4 has images"):
        begins({"idx": 4, "prompt": [{"role": "user", "content": [{"type": "image_url"}]}]})
