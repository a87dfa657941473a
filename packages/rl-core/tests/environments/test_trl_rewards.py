"""Reward functions that were written for TRL run as they are."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from rl_core.config import assemble
from rl_core.environments.instance import environment_types, instance_of
from rl_core.environments.process import EnvironmentProcess, _load
from rl_core.environments.trial import Trial, attempts_on, try_out
from rl_core.rollouts.environment import Conversation, TrainerState

FILE = Path(__file__).parent / "trl_rewards.py"
RIGHT = "<think>6 times 7</think> <answer>42</answer>"
FUNCTIONS = ("format_reward", "accuracy_reward", "length_reward", "curriculum_reward", "code_reward", "judged_reward")
ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"})


def instance(*functions, weights=None):
    section = {"rewards": [f"{FILE}:{function}" for function in functions], "max_batch": 8}
    written = {"trl": {**section, **({} if weights is None else {"reward_weights": weights})}}
    return instance_of(assemble("Env", environment_types(written, {}))(**written), "trl")


def answered(response, *, step=0, prompt=ASKED, is_text=False, **row):
    return Conversation(
        f"c{response}",
        (*prompt, {"role": "assistant", "content": response}),
        {"solution": "42", "task": "math", **row},
        response,
        completion_ids=np.arange(20, dtype=np.int32),
        num_prompt_messages=len(prompt),
        is_text=is_text,
        trainer_state=TrainerState(step, 100),
    )


def results(found, *conversations):
    process = EnvironmentProcess("trl", _load(found.environment, "trl", None)[1])
    answers = process.step([pickle.dumps(conversation) for conversation in conversations])
    return [answer.result for answer in answers]


def test_all_of_them_score_a_batch_together():
    right, code = results(instance(*FUNCTIONS), answered(RIGHT), answered("def f(): 42", task="code"))
    assert right.rewards() == {
        "format_reward": 1.0,
        "accuracy_reward": 1.0,
        "length_reward": -0.25,
        "curriculum_reward": pytest.approx(0.4),
        "judged_reward": 0.5,
        "reward": pytest.approx(2.65),
    }
    # None of another task's function: neither reported nor added
    assert code.rewards()["code_reward"] == 1.0
    assert right.info == {"judged_right": 1.0, "extra": {"verdict": "right"}}


def test_weights_of_a_list_belong_to_the_functions_in_order():
    [result] = results(instance("format_reward", "accuracy_reward", weights=[0.5, 2.0]), answered(RIGHT))
    assert result.rewards() == {"format_reward": 1.0, "accuracy_reward": 1.0, "reward": 2.5}


def test_a_curriculum_follows_the_steps_of_the_training():
    early, late = (results(instance("curriculum_reward"), answered("a b", step=step))[0] for step in (50, 51))
    assert (early.rewards()["reward"], late.rewards()["reward"]) == (pytest.approx(0.2), pytest.approx(-0.2))


def test_a_plain_text_prompt_gives_strings():
    asked = ({"role": "user", "content": "Say yes"},)
    [result] = results(instance("plain_text_reward"), answered("yes!", prompt=asked, is_text=True))
    assert result.rewards()["reward"] == 1.0


def test_later_turns_belong_to_the_completion(tmp_path):
    (tmp_path / "roles.py").write_text(
        "def roles(prompts, completions):\n"
        "    return [{'prompt': len(p), 'said': len(c), 'reward': 0} for p, c in zip(prompts, completions)]\n"
    )
    turns = ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"})
    asked = Conversation("c", (*ASKED, *turns, {"role": "assistant", "content": "c"}), {}, "c", num_prompt_messages=2)
    written = {"roles": {"type": f"{tmp_path}/roles.py:roles"}}
    [result] = results(instance_of(assemble("Env", environment_types(written, {}))(**written), "roles"), asked)
    assert result.rewards() == {"prompt": 2.0, "said": 3.0, "reward": 0.0}


def test_they_pass_the_trial_before_a_run():
    attempts = attempts_on("rows.jsonl, line 1", "rows:train:0", ASKED, {"solution": "42", "task": "math"})
    verdict = try_out([Trial(instance(*FUNCTIONS), attempts)])
    assert (verdict.problems, verdict.warnings) == ([], [])
