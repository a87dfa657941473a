import asyncio

import pytest

from rl_core.environments.reward_function import ConversationEnvironment, plays_one
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer

closed = []


class Guess:
    """Guesses of a number, of which the object counts how many there were."""

    def __init__(self, *, limit=3):
        self.limit = limit
        self.count = 0

    def step(self, response, answer):
        self.count += 1
        if response == answer:
            return {"reward": 1.0, "guesses": float(self.count)}
        return 0.0 if self.count == self.limit else "more" if int(response) < int(answer) else ("less", -0.1)

    def close(self):
        closed.append(self.count)


class Slow:
    async def step(self, response):
        await asyncio.sleep(0)
        return StepResult(done=False, observation=({"role": "user", "content": response},), stop_strings=(".",))


def said(text, id="c"):
    return Conversation(id, (), {"answer": "5"}, text)


def test_an_object_plays_a_conversation():
    made = ConversationEnvironment(Guess, "Guess")
    [first] = made.step([said("3")], [None])
    [second] = made.step([said("7")], [first.state])
    [last] = made.step([said("5")], [second.state])
    assert [result.done for result in (first, second, last)] == [False, False, True]
    assert [result.observation[0]["content"] for result in (first, second)] == ["more", "less"]
    assert [result.rewards() for result in (first, second)] == [{"reward": 0.0}, {"reward": -0.1}]
    assert last.rewards() == {"reward": 1.0, "guesses": 3.0}


def test_conversations_do_not_share_an_object():
    made = ConversationEnvironment(Guess, "Guess")
    results = made.step([said("3", "a"), said("3", "b")], [None, None])
    assert results[0].state is not results[1].state


def test_an_object_is_closed_when_its_conversation_is_over():
    made = ConversationEnvironment(Guess, "Guess")
    [result] = made.step([said("5")], [None])
    closed.clear()
    made.close([result.state, None])
    assert closed == [1]


def test_async_objects_answer_together():
    made = ConversationEnvironment(Slow, "Slow")
    results = made.step([said("a", "a"), said("b", "b")], [None, None])
    assert [result.observation[0]["content"] for result in results] == ["a", "b"]
    assert results[0].stop_strings == (".",)
    made.close([result.state for result in results])


@pytest.mark.parametrize("returned", [None, [], ("a", 1, 2)])
def test_what_is_neither_text_nor_reward_is_refused(returned):
    class Wrong:
        def step(self, response):
            return returned

    with pytest.raises(UnusableAnswer, match=r"Wrong\.step returned .*StepResult"):
        ConversationEnvironment(Wrong, "Wrong").step([said("a")], [None])


def test_a_parameter_that_the_row_lacks_is_named():
    class Wants:
        def step(self, response, anser):
            return 0.0

    with pytest.raises(UnusableAnswer, match=r"Wants.step asks for 'anser'; did you mean answer"):
        ConversationEnvironment(Wants, "Wants").step([said("a")], [None])


def test_a_class_is_told_from_one_that_steps_batches():
    class Batched:
        def step(self, conversations, states):
            return []

    assert plays_one(Guess)
    assert not plays_one(Batched)
    assert not plays_one(int)


def test_an_object_may_play_a_game_of_several_agents():
    class Game:
        def step(self, response):
            seen = ({"role": "user", "content": response},)
            return StepResult(
                done=False, observation=seen, agent="first", next_agent="second", agent_rewards={"second": -1.0}
            )

    [result] = ConversationEnvironment(Game, "Game").step([said("3")], [None])
    assert (result.agent, result.next_agent, result.agent_rewards) == ("first", "second", {"second": -1.0})
