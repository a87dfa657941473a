"""The environment's side of a rollout: answers are recorded, and given again when the rollout runs again."""

import asyncio
import dataclasses
import json
import logging

import numpy as np
import pytest

from rl_algos.judges.judged import CONVERSATION
from rl_algos.rollouts.worker.conversations import _WARNED, Conversations, turn_digest
from rl_core.errors import EnvironmentFailed
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, KeptState, Resumption, StepResult, ToolCall


class Counter:
    """An environment that counts the turns of each conversation, and ends at `last`."""

    def __init__(self, *, saves=True, keeps_state=True, last=3, bonus=0.0):
        self.saves, self.keeps_state, self.last, self.bonus = saves, keeps_state, last, bonus
        self.counts, self.asked, self.abandoned = {}, [], []

    async def step(self, conversation):
        self.asked.append(conversation)
        count = self.counts.get(conversation.id)
        if conversation.resumption is not None:
            count = int(conversation.resumption.saved or conversation.turn)
        elif conversation.turn and count is None:
            return EnvironmentFailure("nobody knows it", "lost")
        self.counts[conversation.id] = count = (count or 0) + 1
        said = ({"role": "user", "content": str(count)},)
        state = KeptState(str(count).encode() if self.saves else None) if self.keeps_state else None
        done = count == self.last
        return StepResult(count + self.bonus, done, said, None if done else state)

    async def abandon(self, ids):
        self.abandoned += ids


def turn(number, text="go", id="a"):
    return Conversation(id, (), {}, f"{text} {number}", turn=number, completion_ids=np.array([number], np.int32))


def play(environment, *turns, earlier=(), seed=3):
    async def run():
        conversations = Conversations(environment, "counter", seed, earlier)
        results = [await conversations.step(each) for each in turns]
        found = conversations.turns
        await conversations.release()
        return [result.reward for result in results], found

    return asyncio.run(run())


def turns_of(*numbers, id="a", text="go"):
    return [turn(number, text, id) for number in numbers]


def test_the_answer_that_ends_a_conversation_has_it_for_functions_that_score_later() -> None:
    async def run():
        conversations = Conversations(Counter(last=2), "counter", 3, (), keeps_last=True)
        call = ToolCall("add", {"a": 1}, id="c0")
        shown = dataclasses.replace(turn(1), messages=({"role": "user", "content": "?"},), tool_calls=(call,))
        return shown, [await conversations.step(each) for each in (turn(0), shown)]

    shown, (first, last) = asyncio.run(run())
    assert first.info == {}
    kept = json.loads(json.dumps(last.info[CONVERSATION]))
    again = Conversation.from_plain(shown.id, shown.info, kept)
    assert again == shown
    assert again.completion_ids.tolist() == [1]


@pytest.fixture(autouse=True)
def unwarned():
    _WARNED.clear()


def test_answers_of_a_saved_conversation_are_given_again_and_it_resumes():
    _, earlier = play(Counter(), *turns_of(0, 1))
    environment = Counter()
    rewards, found = play(environment, *turns_of(0, 1, 2, id="b"), earlier=earlier)
    assert rewards == [1, 2, 3]
    [asked] = environment.asked
    assert (asked.turn, asked.resumption) == (2, Resumption(b"2"))
    assert [len(each.digests) for each in found] == [3]


def test_of_several_answers_only_the_last_state_is_kept():
    _, [answered] = play(Counter(), *turns_of(0, 1))
    assert [result.state for result in answered.results] == [KeptState(), KeptState(b"2")]


@pytest.mark.parametrize("saves", [True, False])
def test_a_conversation_that_ended_needs_no_environment(saves):
    expected, earlier = play(Counter(saves=saves), *turns_of(0, 1, 2))
    environment = Counter(saves=saves)
    assert play(environment, *turns_of(0, 1, 2), earlier=earlier)[0] == expected
    assert (environment.asked, environment.abandoned) == ([], [])


def test_a_conversation_without_a_state_goes_on_without_replay():
    _, earlier = play(Counter(keeps_state=False), *turns_of(0, 1))
    environment = Counter(keeps_state=False)
    assert play(environment, *turns_of(0, 1, 2, id="b"), earlier=earlier)[0] == [1, 2, 3]
    assert [each.resumption for each in environment.asked] == [Resumption()]


def test_without_a_saved_state_the_environment_takes_its_steps_again_with_the_same_seed(caplog):
    caplog.set_level(logging.WARNING)
    first = Counter(saves=False)
    _, earlier = play(first, *turns_of(0, 1))
    again = Counter(saves=False)
    assert play(again, *turns_of(0, 1, 2, id="b"), earlier=earlier)[0] == [1, 2, 3]
    assert [each.turn for each in again.asked] == [0, 1, 2]
    assert {each.seed for each in first.asked} == {each.seed for each in again.asked}
    assert len({each.seed for each in first.asked}) == 1
    assert caplog.records == []


def test_an_environment_that_answers_otherwise_is_named_once(caplog):
    caplog.set_level(logging.WARNING)
    _, earlier = play(Counter(saves=False), *turns_of(0, 1))
    for _ in range(2):
        rewards, found = play(Counter(saves=False, bonus=0.5), *turns_of(0, 1), earlier=earlier)
        assert rewards == [1.5, 2.5]
        assert [result.reward for result in found[0].results] == [1.5, 2.5]
    [record] = caplog.records
    assert "environment counter answered otherwise" in record.message


def test_a_conversation_that_takes_another_course_takes_it_in_the_environment_too():
    _, earlier = play(Counter(last=9), *turns_of(0, 1, 2))
    environment = Counter(last=9)
    rewards, [found] = play(environment, turn(0), turn(1, "stop"), turn(2), earlier=earlier)
    assert rewards == [1, 2, 3]
    # the state behind the first answer was not kept, so that turn is taken again
    assert [each.completion for each in environment.asked] == ["go 0", "stop 1", "go 2"]
    assert found.digests != earlier[0].digests


def test_a_conversation_that_was_lost_resumes_under_another_name():
    class Dies(Counter):
        async def step(self, conversation):
            if conversation.turn == 2 and conversation.id == "a":
                self.counts.clear()
            return await super().step(conversation)

    environment = Dies(last=4)
    assert play(environment, *turns_of(0, 1, 2, 3))[0] == [1, 2, 3, 4]
    assert [each.id for each in environment.asked] == ["a", "a", "a", "a+", "a+"]
    with pytest.raises(EnvironmentFailed, match="nobody knows it"):
        play(Dies(last=4, saves=False), *turns_of(0, 1, 2))


def test_conversations_have_seeds_of_their_own_and_are_told_apart():
    environment = Counter()
    both = [turn(0, "go", "a"), turn(0, "go", "b"), turn(1, "go", "b"), turn(1, "go", "a")]
    _, earlier = play(environment, *both)
    assert [len(each.digests) for each in earlier] == [2, 2]
    seeds = {each.id: each.seed for each in environment.asked}
    assert len(set(seeds.values())) == 2
    other = Counter()
    play(other, *both, seed=4)
    assert {each.seed for each in other.asked}.isdisjoint(seeds.values())
    again = Counter()
    play(again, *both, turn(2, "go", "a"), earlier=earlier)
    assert [(each.turn, each.seed) for each in again.asked] == [(2, seeds["a"])]
    assert again.abandoned == []


def test_answers_of_conversations_that_have_not_begun_again_are_kept():
    _, earlier = play(Counter(), *turns_of(0, 1))
    assert play(Counter(), earlier=earlier)[1] == earlier


def test_what_the_environment_holds_is_released():
    environment = Counter()
    play(environment, *turns_of(0, 1))
    assert environment.abandoned == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"completion": "stop"},
        {"truncated": True},
        {"turn": 1},
        {"messages": ({"role": "user", "content": "?"},)},
        {"tool_calls": (ToolCall("f", {"x": 1}),)},
        {"completion_ids": np.array([7], np.int32)},
    ],
)
def test_the_digest_of_a_turn_tells_turns_apart(change):
    same = {"id": "b", "seed": 9, "resumption": Resumption(b"x")}
    assert turn_digest(dataclasses.replace(turn(0), **same)) == turn_digest(turn(0))
    assert turn_digest(dataclasses.replace(turn(0), **change)) != turn_digest(turn(0))
