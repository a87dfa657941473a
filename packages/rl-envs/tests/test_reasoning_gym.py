from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_core.environments.pool import EnvironmentPool
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import DATASETS, ENVIRONMENTS, plugin, resolve
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.reasoning_gym import generation
from rl_envs.reasoning_gym.dataset import load
from rl_envs.reasoning_gym.environment import ReasoningGymEnvironment
from rl_envs.reasoning_gym.plugin import ReasoningGymConfig, ReasoningGymSettings

# between them: numbers, text, tuples in the metadata, no single answer, numpy in the metadata
TASKS = ["chain_sum", "spell_backward", "arc_agi", "countdown", "knights_knaves", "acre"]


def rows(split: str = "train", **settings: Any) -> list[dict[str, Any]]:
    return generation.rows(ReasoningGymSettings(**{"task": "chain_sum", "size": 20, **settings}), split)


def answered(row: dict[str, Any], completion: str, name: str = "0") -> Conversation:
    return Conversation(id=name, messages=tuple(row["messages"]), info=row["info"], completion=completion)


def score(row: dict[str, Any], completion: str, **config: Any) -> StepResult:
    return ReasoningGymEnvironment(ReasoningGymConfig(**config)).step([answered(row, completion)], [None])[0]


def question(row: dict[str, Any]) -> str:
    return ast.literal_eval(row["info"]["entry"])["question"]


class TestReasoningGymEnvironment(EnvironmentSuite):
    def environment(self) -> ReasoningGymEnvironment:
        return ReasoningGymEnvironment(ReasoningGymConfig())

    def conversations(self) -> list[Conversation]:
        made = rows(size=3)
        return [
            *(answered(row, f"<answer>{row['answer']}</answer>", str(i)) for i, row in enumerate(made)),
            answered(made[0], "<answer>no</answer>", "wrong"),
            answered(made[0], "no idea", "none"),
        ]


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_scores_one_and_another_less(task: str) -> None:
    row = json.loads(json.dumps(rows(task=task, size=1)[0]))
    assert score(row, f"so <answer>{row['answer']}</answer>").reward == 1.0
    assert score(row, "<answer>certainly not</answer>").rewards()["reward"] < 1.0
    assert score(row, str(row["answer"])).reward == 0.0


@pytest.mark.parametrize(
    ("answer_format", "completion"),
    [("tag", "<answer>1</answer> <answer> {} </answer>"), ("boxed", r"\boxed{{{}}}"), ("plain", "{}\n")],
)
def test_answers_are_read_in_the_format_that_the_prompt_asks_for(answer_format: str, completion: str) -> None:
    row = rows(size=1, answer_format=answer_format)[0]
    asks = {"tag": "</answer>", "boxed": r"\boxed", "plain": "nothing else"}[answer_format]
    assert asks in row["messages"][0]["content"]
    assert question(row).strip() in row["messages"][0]["content"]
    assert score(row, completion.format(row["answer"])).reward == 1.0


def test_the_format_reward_is_for_an_answer_of_any_kind() -> None:
    row = rows(size=1)[0]
    assert score(row, f"<answer>{row['answer']}</answer>", format_reward=0.5).rewards()["reward"] == 1.5
    assert score(row, "<answer>x</answer>", format_reward=0.5).rewards() == {"reward": 0.5, "score": 0.0, "format": 0.5}
    assert score(row, "x", format_reward=0.5).rewards()["reward"] == 0.0


def test_splits_are_disjoint_whatever_their_seeds_and_sizes() -> None:
    # 200 questions of two one-digit numbers: without the digest these splits would overlap
    small = {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    train = {question(row) for seed in range(5) for row in rows(seed=1000 * seed, size=200, **small)}
    validation = {question(row) for seed in range(5) for row in rows("validation", seed=1000 * seed, size=10, **small)}
    assert not train & validation
    assert len(validation) >= 10
    assert len(train) > 150


def test_validation_holds_no_question_twice() -> None:
    questions = [question(row) for row in rows("validation", size=60)]
    assert len(set(questions)) == 60


def test_seed_and_task_config_decide_the_questions() -> None:
    assert rows(seed=1) == rows(seed=1)
    assert rows(seed=1) != rows(seed=1000)
    assert rows(seed=1, size=10) == rows(seed=1, size=20)[:10]
    longer = rows(config={"min_terms": 9, "max_terms": 9}, size=3)
    assert all(ast.literal_eval(row["info"]["entry"])["metadata"]["num_terms"] == 9 for row in longer)


def test_rows_do_not_depend_on_the_order_of_sets() -> None:
    code = (
        "import json; from rl_envs.reasoning_gym.dataset import load; "
        "print(json.dumps(load({'task': 'word_ladder', 'size': 3}, 'train')))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop())) == 3


def test_loading_imports_nothing_heavy_here() -> None:
    code = (
        "import sys; from rl_core.plugins import DATASETS, plugin, resolve\n"
        "made = resolve(plugin(DATASETS, 'reasoning_gym').load)({'task': 'chain_sum', 'size': 2}, 'validation')\n"
        "assert len(made) == 2 and 'reasoning_gym' not in sys.modules, sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_too_small_a_task_is_an_error_that_says_so() -> None:
    one = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match=r"too few questions.*smaller size"):
        rows("validation", config=one, size=300)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"task": "chain_sums"}, ConfigError, r"did you mean chain_sum\? rl data list reasoning_gym lists all \d+"),
        ({"task": "sums"}, ConfigError, r"no reasoning_gym task 'sums'; the nearest are .*_sum.*\. rl data list"),
        ({"config": {"min_term": 2}}, ConfigError, "did you mean min_terms"),
        ({"config": {"seed": 2}}, ConfigError, "move it up"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, ConfigError, "refuses its config"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rows(**settings)


def test_errors_come_through_the_process_that_generates() -> None:
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        load({"task": "chain_sums"}, "train")
    with pytest.raises(DataError, match="'test'"):
        load({"task": "chain_sum"}, "test")


def test_an_environment_needs_the_datasets_prompts() -> None:
    with pytest.raises(ValueError, match="come from the dataset"):
        score({"messages": [], "info": {"answer": "1"}}, "1")


def test_scored_in_a_pool() -> None:
    environment = plugin(ENVIRONMENTS, "reasoning_gym").environment
    assert resolve(environment) is ReasoningGymEnvironment
    assert resolve(plugin(DATASETS, "reasoning_gym").load) is load
    made = rows(size=10)

    async def run() -> list[StepResult | EnvironmentFailure]:
        pool = EnvironmentPool(environment, ReasoningGymConfig(), num_workers=1, deadline_s=240.0)
        try:
            return await pool.step(
                [
                    answered(row, f"<answer>{row['answer'] if i % 2 else 'x'}</answer>", str(i))
                    for i, row in enumerate(made)
                ]
            )
        finally:
            await pool.close()

    assert [outcome.reward for outcome in asyncio.run(run())] == [0.0, 1.0] * 5
