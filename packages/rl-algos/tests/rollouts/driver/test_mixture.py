"""Datasets of a run that has several: what is earned on each, and how often it is drawn from."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from rollouts_builder import make_prompt, make_rollout

from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import CurriculumConfig
from rl_algos.rollouts.driver.mixture import Mixture
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout

NAMES = ["easy", "middle", "hard"]
SUCCESS = {"easy": [1.0, 1.0, 1.0, 1.0], "middle": [1.0, 0.0, 0.2, 1.0], "hard": [0.0, 0.9, 0.0, 0.0]}


def prompt_of(name, id="p"):
    return replace(make_prompt(id), dataset=name)


def stream():
    return Stream([[prompt_of(name, f"{name}{index}") for index in range(8)] for name in NAMES])


def rolled_out(prompts):
    return [
        RolloutGroup.of(prompt, [make_rollout(prompt, reward) for reward in SUCCESS[prompt.dataset]])
        for prompt in prompts
    ]


def test_rewards_and_prompts_are_told_by_dataset():
    mixture = Mixture(stream(), NAMES, None)
    metrics = mixture.learn(rolled_out([prompt_of("easy"), prompt_of("middle"), prompt_of("middle")]))
    assert metrics == {
        "dataset/easy/prompts": 1,
        "dataset/easy/reward": 1,
        "dataset/middle/prompts": 2,
        "dataset/middle/reward": pytest.approx(0.55),
        "dataset/hard/prompts": 0,
    }


def test_failed_rollouts_do_not_count():
    prompt = prompt_of("easy")
    group = RolloutGroup.of(prompt, [make_rollout(prompt, 1.0), Rollout.failed(prompt, "why")])
    lost = RolloutGroup.of(prompt, [Rollout.failed(prompt, "why")])
    mixture = Mixture(stream(), NAMES, CurriculumConfig(enabled=True))
    metrics = mixture.learn([lost, group])
    assert metrics["dataset/easy/reward"] == metrics["dataset/easy/success"] == 1
    assert metrics["dataset/easy/weight"] == 0.1


def test_a_curriculum_draws_by_the_variance_of_success():
    prompts = stream()
    mixture = Mixture(prompts, NAMES, CurriculumConfig(enabled=True, floor=0.2))
    metrics = mixture.learn(rolled_out(prompts.take(6)))
    # success 1, 1/2 and 0
    weights = {"easy": 0.2, "middle": 1.0, "hard": 0.2}
    assert {name: metrics[f"dataset/{name}/weight"] for name in NAMES} == weights
    drawn = Counter(prompt.dataset for prompt in prompts.take(140))
    assert drawn == {"easy": 20, "middle": 100, "hard": 20}


def test_success_is_a_mean_at_first_and_then_an_exponential_average():
    mixture = Mixture(stream(), NAMES, CurriculumConfig(enabled=True, window=3, success_reward=0.9))
    prompt = prompt_of("easy")
    seen = []
    for rewards in ([0.9, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]):
        group = RolloutGroup.of(prompt, [make_rollout(prompt, reward) for reward in rewards])
        seen.append(mixture.learn([group])["dataset/easy/success"])
    assert seen == pytest.approx([0.5, 0.75, 0.5, 0.5 + 0.5 / 3])


def test_a_restored_curriculum_goes_on_as_the_saved_one():
    settings = CurriculumConfig(enabled=True, window=4)
    first_stream, second_stream = stream(), stream()
    first, second = Mixture(first_stream, NAMES, settings), Mixture(second_stream, NAMES, settings)
    for _ in range(3):
        first.learn(rolled_out(first_stream.take(4)))
    second_stream.restore(json.loads(json.dumps(first_stream.state())))
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(5):
        prompts = second_stream.take(4)
        assert [prompt.id for prompt in prompts] == [prompt.id for prompt in first_stream.take(4)]
        assert first.learn(rolled_out(prompts)) == second.learn(rolled_out(prompts))
