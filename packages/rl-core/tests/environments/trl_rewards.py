"""Reward functions as they are written for TRL's `GRPOTrainer`. They run as they are."""
# ruff: noqa: B905 - written as most of them are

import asyncio
import re

FORMAT = re.compile(r"<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>", re.DOTALL)


def format_reward(completions, **kwargs):
    """1 for a thought and an answer in their tags."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if FORMAT.fullmatch(content.strip()) else 0.0 for content in contents]


def accuracy_reward(completions, solution, **kwargs):
    """1 for the right answer."""
    found = [FORMAT.search(completion[0]["content"]) for completion in completions]
    return [float(match is not None and match["answer"].strip() == right) for match, right in zip(found, solution)]


def length_reward(completion_ids, **kwargs):
    """Less for every token beyond 16."""
    return [-max(len(ids) - 16, 0) / 16 for ids in completion_ids]


def curriculum_reward(prompts, completions, trainer_state, **kwargs):
    """Words count in the first half of the training, and brevity in the second."""
    is_late = trainer_state.global_step > trainer_state.max_steps / 2
    num_words = [len(completion[0]["content"].split()) for completion in completions]
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [-0.1 * number if is_late else 0.1 * number for number in num_words]


def code_reward(completions, task, **kwargs):
    """For rows of another task only: whether the completion is a function."""
    pairs = zip(completions, task)
    return [float("def " in completion[0]["content"]) if kind == "code" else None for completion, kind in pairs]


async def judged_reward(prompts, completions, solution, log_metric=None, log_extra=None, **kwargs):
    """A judge that is asked over the network, and what it said."""

    async def judge(completion, right):
        await asyncio.sleep(0)
        return right in completion[0]["content"]

    verdicts = await asyncio.gather(*(judge(*pair) for pair in zip(completions, solution)))
    if log_extra:
        log_extra("verdict", ["right" if verdict else "wrong" for verdict in verdicts])
    if log_metric:
        log_metric("judged_right", sum(verdicts) / len(verdicts))
    return [0.5 if verdict else 0.0 for verdict in verdicts]


def plain_text_reward(prompts, completions, **kwargs):
    """For datasets whose prompts are strings."""
    return [float(completion.startswith(prompt.split()[-1])) for prompt, completion in zip(prompts, completions)]
