"""Conformance of environments."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_core.environments.messages import MAX_STATE_BYTES, read_reply, write_answers
from rl_core.environments.process import EnvironmentProcess
from rl_core.rollouts.environment import Conversation, Environment, SavingEnvironment, StepResult


class EnvironmentSuite:
    """Conformance of an `Environment`: subclass it in a test module and override the two methods that raise here."""

    def environment(self) -> Environment:
        """Return a fresh environment."""
        raise NotImplementedError

    def conversations(self) -> Sequence[Conversation]:
        """Return at least three first turns with different ids, not all rewarded alike."""
        raise NotImplementedError

    def test_the_conversations_tell_environments_apart(self) -> None:
        """Show that results differ, as the other tests would show little otherwise."""
        conversations = self.conversations()
        assert len({conversation.id for conversation in conversations}) == len(conversations) >= 3
        assert len({result.rewards()["reward"] for result in _step(self.environment(), conversations)}) > 1

    def test_a_step_gives_one_result_per_conversation_in_order(self) -> None:
        """Score a batch as its members are scored alone, in any order."""
        conversations = self.conversations()
        together = _step(self.environment(), conversations)
        backwards = _step(self.environment(), conversations[::-1])[::-1]
        alone = [_step(self.environment(), [conversation])[0] for conversation in conversations]
        assert [_visible(result) for result in together] == [_visible(result) for result in alone]
        assert [_visible(result) for result in together] == [_visible(result) for result in backwards]

    def test_no_conversations_no_results(self) -> None:
        """Answer an empty batch with an empty list."""
        assert self.environment().step([], []) == []

    def test_a_step_is_deterministic(self) -> None:
        """Compare two environments of the same config, and one with itself."""
        environment, conversations = self.environment(), self.conversations()
        first = [_visible(result) for result in _step(environment, conversations)]
        assert first == [_visible(result) for result in _step(environment, conversations)]
        assert first == [_visible(result) for result in _step(self.environment(), conversations)]

    def test_states_thread_through_turns(self) -> None:
        """Continue each state where its own conversation left off, whatever else the environment does."""
        environment, other, conversations = self.environment(), self.environment(), self.conversations()
        states = [result.state for result in _step(environment, conversations)]
        goes_on = [not result.done for result in _step(other, conversations)]
        more = [c for c, going in zip(conversations, goes_on, strict=True) if going]
        kept = [state for state, going in zip(states, goes_on, strict=True) if going]
        _step(environment, conversations)
        together = _step(environment, more, kept)
        for conversation, result in zip(more, together, strict=True):
            alone = self.environment()
            [first] = _step(alone, [conversation])
            [second] = _step(alone, [conversation], [first.state])
            assert _visible(second) == _visible(result)

    def test_a_result_that_goes_on_says_what_comes_next(self) -> None:
        """Require an observation of messages with a role and a content for the next turn."""
        for result in _step(self.environment(), self.conversations()):
            assert result.done or result.observation
            assert all({"role", "content"} <= set(message) for message in result.observation)

    def test_results_leave_the_process(self) -> None:
        """Require finite rewards, and plain values except for the state, which cross processes unchanged."""
        conversations = self.conversations()
        process = EnvironmentProcess("the environment", self.environment())
        pickled = [pickle.dumps(conversation) for conversation in conversations]
        answers = read_reply(("step", pickled, {}), write_answers(process.step(pickled)))
        assert [getattr(answer.result, "reason", "") for answer in answers] == [""] * len(conversations)

    def test_saved_states_go_on_elsewhere(self) -> None:
        """Save a conversation halfway and restore it in another environment, which answers as the first one does.

        Environments without `save` and `restore` pass: they are replayed (`test_a_step_is_deterministic`).
        """
        environment, conversations = self.environment(), self.conversations()
        if not isinstance(environment, SavingEnvironment):
            return
        results = _step(environment, conversations)
        under_way = [
            (replace(conversation, turn=conversation.turn + 1), result.state)
            for conversation, result in zip(conversations, results, strict=True)
            if not result.done and result.state is not None
        ]
        saved = environment.save([state for _, state in under_way])
        assert len(saved) == len(under_way)
        assert all(data is None or len(data) <= MAX_STATE_BYTES for data in saved)
        going_on = [(*each, data) for each, data in zip(under_way, saved, strict=True) if data is not None]
        other = self.environment()
        assert isinstance(other, SavingEnvironment)
        restored = other.restore([data for _, _, data in going_on])
        elsewhere = _step(other, [conversation for conversation, _, _ in going_on], restored)
        here = _step(
            environment, [conversation for conversation, _, _ in going_on], [state for _, state, _ in going_on]
        )
        assert [_visible(result) for result in elsewhere] == [_visible(result) for result in here]
        for each, found in ((environment, here), (other, elsewhere)):
            each.close([result.state for result in found if not result.done and result.state is not None])

    def test_closing_twice_is_closing_once(self) -> None:
        """Close states of unfinished conversations, none at all, and states that are closed already."""
        environment = self.environment()
        states = [r.state for r in _step(environment, self.conversations()) if not r.done]
        environment.close(states)
        environment.close(states)
        environment.close([])
        assert len(_step(environment, self.conversations())) == len(self.conversations())


def _step(
    environment: Environment, conversations: Sequence[Conversation], states: Sequence[Any] | None = None
) -> list[StepResult]:
    """Return the results of a step, of which none may be a failure."""
    results = environment.step(conversations, [None] * len(conversations) if states is None else states)
    assert isinstance(results, list)
    found = [result for result in results if isinstance(result, StepResult)]
    assert len(found) == len(results) == len(conversations), f"not a StepResult for each conversation: {results}"
    return found


def _visible(result: StepResult) -> tuple[Any, ...]:
    return (
        sorted(result.rewards().items()),
        result.done,
        [dict(message) for message in result.observation],
        result.stop_strings,
        dict(result.info),
    )
