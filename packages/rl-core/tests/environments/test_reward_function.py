"""Functions that score responses, by what their parameters are called."""

import functools

import numpy as np
import pytest

from rl_core.environments.reward_function import as_environment
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer


def said(response, prompt="1+2=", truncated=False, **row):
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": response})
    return Conversation("0", messages, row, completion=response, truncated=truncated)


def rewards(function, *conversations):
    return [each.reward for each in as_environment(function).step(conversations, [None] * len(conversations))]


def test_parameters_are_given_what_their_names_say():
    def score(response, completion, prompt, messages, truncated, answer):
        return {"seen": (response, completion, prompt, len(messages), truncated, answer)}

    assert rewards(score, said("3", truncated=True, answer="4", level=1)) == [
        {"seen": ("3", "3", "1+2=", 2, True, "4")}
    ]


def test_a_parameter_with_a_default_may_be_missing_from_the_row():
    def score(response, scale=2.0, *, bonus=0.0):
        return len(response) * scale + bonus

    assert rewards(score, said("abc"), said("abc", scale=3), said("abc", bonus=1.0)) == [6.0, 9.0, 7.0]


def test_the_rest_of_the_row_goes_to_keywords_that_are_not_named():
    def score(response, answer, **row):
        return {"fields": sorted(row)}

    # a column that is called as what every response has is not a field beside it
    assert rewards(score, said("3", answer="3", level=1, topic="x", prompt_=0, completion="")) == [
        {"fields": ["level", "prompt_", "topic"]}
    ]


def test_a_parameter_that_the_row_does_not_have_is_named_with_the_nearest():
    def score(response, anwser):
        return 0.0

    with pytest.raises(
        UnusableAnswer, match=r"score asks for 'anwser'; did you mean answer\? The row has answer, level;"
    ):
        rewards(score, said("3", answer="3", level=1))
    with pytest.raises(UnusableAnswer, match=r"asks for 'anwser'; the row has no fields; other parameters may be resp"):
        rewards(score, said("3"))


def test_the_prompt_is_the_text_of_the_message_that_is_answered():
    parts = [{"type": "text", "text": "look: "}, {"type": "image"}, {"type": "text", "text": "what?"}]
    turns = [("user", "a"), ("assistant", "b"), ("user", parts), ("assistant", "c")]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    conversation = Conversation("0", messages, {}, completion="c")
    assert rewards(lambda prompt: {"prompt": prompt}, conversation) == [{"prompt": "look: what?"}]


def test_an_async_function_scores_the_conversations_of_a_call_at_once():
    import asyncio

    met = []

    async def score(response):
        met.append(response)
        while len(met) < 2:
            await asyncio.sleep(0)
        return float(len(response))

    environment = as_environment(score)
    assert [each.reward for each in environment.step([said("a"), said("bb")], [None] * 2)] == [1.0, 2.0]
    # a client that it keeps belongs to one loop
    assert [each.reward for each in environment.step([said("ccc")], [None])] == [3.0]


class _Length:
    def __call__(self, response):
        return float(len(response))

    def method(self, response):
        return self(response)


class _AsyncLength(_Length):
    async def __call__(self, response):
        return float(len(response))


async def _length(response, factor=1.0):
    return factor * len(response)


@pytest.mark.parametrize(
    "score",
    [
        pytest.param(_Length(), id="an object"),
        pytest.param(_Length().method, id="a method"),
        pytest.param(_AsyncLength(), id="an object with an async call"),
        pytest.param(functools.partial(_length, factor=1.0), id="a partial of an async function"),
        pytest.param(functools.partial(_Length()), id="a partial of an object"),
        pytest.param(lambda response: float(len(response)), id="a lambda"),
    ],
)
def test_whatever_is_called_scores(score):
    assert rewards(score, said("abc")) == [3.0]


def test_a_builtin_that_takes_no_names_is_refused():
    with pytest.raises(ValueError, match="by position only"):
        as_environment(len)


def test_a_function_of_lists_scores_many_at_once():
    def score(responses, prompts, answer, **row):
        assert row == {"level": [1, 2]}
        assert prompts == ["1+2=", "1+2="]
        return [float(c == a) for c, a in zip(responses, answer, strict=True)]

    environment = as_environment(score)
    both = [said("3", answer="3", level=1), said("4", answer="3", level=2)]
    assert [each.reward for each in environment.step(both, [None] * 2)] == [1.0, 0.0]
    assert rewards(lambda responses: np.array([0.5]), said("x")) == [0.5]
    assert environment.step([], []) == []


def test_none_in_a_list_means_that_the_function_does_not_apply():
    [scored, other] = as_environment(lambda responses: [1.0, None]).step([said("a"), said("b")], [None] * 2)
    assert (scored.rewards(), other.reward, other.rewards()) == ({"reward": 1.0}, {}, {"reward": 0.0})


def test_a_function_of_one_response_logs_next_to_its_reward():
    def score(response, trainer_state, log_metric, log_extra):
        log_metric("length", len(response))
        log_metric("length", 5)
        log_extra("first", [response[:1]])
        return float(trainer_state.global_step)

    [result] = as_environment(score).step([said("abc")], [None])
    assert (result.reward, result.info) == (0.0, {"length": 4.0, "extra": {"first": "a"}})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda log_metric, log_extra: log_metric("a", "b"), "log_metric.'a', 'b'.; give a number"),
        (lambda log_metric, log_extra: log_extra("a", ["b", "c"]), "a value for each of the 1 responses"),
        (lambda log_metric, log_extra: log_extra("a", "b"), "a value for each of the 1 responses"),
    ],
)
def test_what_cannot_be_logged_is_told(call, says):
    def score(response, log_metric, log_extra):
        call(log_metric, log_extra)
        return 0.0

    with pytest.raises(UnusableAnswer, match=says):
        rewards(score, said("a"))


@pytest.mark.parametrize(
    ("returned", "says"), [(1.0, "returned 1.0; .* a list of rewards"), ([1.0], "1 rewards for 2")]
)
def test_a_function_of_lists_returns_a_reward_for_each(returned, says):
    with pytest.raises(UnusableAnswer, match=says):
        rewards(lambda completions: returned, said("a"), said("b"))


def test_a_function_may_return_a_result_itself():
    [result] = as_environment(lambda response: StepResult(1.0, info={"length": 2})).step([said("ab")], [None])
    assert (result.reward, result.info) == (1.0, {"length": 2})


def test_what_cannot_be_called_by_names_is_refused():
    with pytest.raises(ValueError, match="3 is not a function; a reward is one"):
        as_environment(3)
    with pytest.raises(ValueError, match=r"takes response by position only; remove the `/`"):
        as_environment(lambda response, /: 0.0)
