import asyncio
import dataclasses
import json

import numpy as np
import pytest

from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.program import Reply
from rl_core.rollouts.record import rollout_record
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

THINK = 99
"""The token of a prompt that opens thoughts."""
PROMPT = Prompt("p0", ({"role": "user", "content": "hi"},), np.array([1, 2, 3], np.int32), "game", {"goal": 9})


class ScriptedClient:
    """Says what it is told to, and answers with scripted results."""

    def __init__(self, completions, results):
        self.sampling = SamplingParams(max_new_tokens=4)
        self.completions, self.results = list(completions), list(results)
        self.contexts: list[list[int]] = []
        self.asked: list[SamplingParams] = []
        self.seen: list[Conversation] = []

    async def generate(self, token_ids, sampling=None, *, agent=""):
        self.contexts.append(token_ids.tolist())
        self.asked.append(sampling)
        return self.completions.pop(0)

    async def step(self, conversation):
        self.seen.append(conversation)
        return self.results.pop(0)

    def read(self, token_ids):
        text = "".join(chr(96 + token) for token in token_ids)
        calls = (ToolCall(text, {}, error="broken" if text == "hi" else ""),) if text.startswith("h") else ()
        return Reply(text, {"role": "assistant", "content": text}, calls)

    def shown(self, token_ids):
        return "<think>" if token_ids[-1] == THINK else ""

    def continuation(self, turn, observation, sampled):
        return np.array([50 + len(turn["content"])] * len(observation), np.int32)

    def rendered(self, messages, so_far):
        """Goes on from what was said, unless it was told to forget that."""
        forgets = messages[-1]["content"] == "forget"
        return np.array([1, 60 + len(messages)] if forgets else [*so_far, 60 + len(messages)], np.int32)


def said(*tokens, reason="stop", version=3):
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Completion(np.array(tokens, np.int32), logprobs, reason, (WeightSpan(version, len(tokens)),))


def routed(completion, experts):
    """The same, with the experts of tokens in a model of one layer that sends each token to one."""
    column = np.array(experts, np.int16)[:, None, None]
    return dataclasses.replace(completion, routed_experts=column)


def observed(text="go on", **kwargs):
    return StepResult(done=False, observation=({"role": "user", "content": text},), **kwargs)


def play(client, *, max_turns=5, max_tokens=100, **settings):
    program = MultiTurnProgram(max_turns=max_turns, max_tokens=max_tokens, **settings)
    return asyncio.run(program.run(PROMPT, client))


def test_a_single_turn_keeps_the_sampled_tokens_and_masks_the_prompt():
    rollout = play(ScriptedClient([said(4, 5)], [StepResult(reward=1.0)]))
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 5]
    assert rollout.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert rollout.generation_logprobs.tolist() == [0, 0, 0, -1, -2]
    assert rollout.spans == (WeightSpan(3, 2),)
    assert (rollout.reward, rollout.status, rollout.stop_reason) == (1.0, "ok", "stop")


def test_turns_alternate_and_observations_are_masked():
    client = ScriptedClient(
        [said(4, 5, version=3), said(6, version=4)],
        [observed(reward={"format": 0.5}), StepResult(reward={"reward": 1.0})],
    )
    rollout = play(client)
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 5, 52, 6]
    assert rollout.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert client.contexts == [[1, 2, 3], [1, 2, 3, 4, 5, 52]]
    assert rollout.spans == (WeightSpan(3, 2), WeightSpan(4, 1))
    assert rollout.rewards == {"format": 0.5, "reward": 1.5}
    assert [turn.observation is None for turn in rollout.turns] == [False, True]


def test_routing_is_that_of_the_pass_in_which_a_token_was_first_fed():
    first, second = routed(said(4, 5), [10, 11, 12, 13]), routed(said(6, 7), [20, 21, 22, 23, 24, 25, 26])
    rollout = play(ScriptedClient([first, second], [observed(), StepResult(reward=1.0)]))
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 5, 52, 6, 7]
    # the last token of the first turn and the observation are fed in the second turn; the last of all never
    assert rollout.routed_experts[:, 0, 0].tolist() == [10, 11, 12, 13, 24, 25, 26, -1]


def test_routing_of_an_observation_that_ends_a_rollout_is_unknown():
    rollout = play(ScriptedClient([routed(said(4), [10, 11, 12])], [StepResult(reward=1.0)]))
    assert rollout.routed_experts[:, 0, 0].tolist() == [10, 11, 12, -1]
    assert play(ScriptedClient([said(4)], [StepResult()])).routed_experts is None


def test_one_conversation_keeps_its_id_and_grows():
    client = ScriptedClient([said(4), said(5)], [observed("next"), StepResult()])
    play(client)
    first, second = client.seen
    assert first.id == second.id
    assert [message["content"] for message in second.messages] == ["hi", "d", "next", "e"]
    assert second.info == {"goal": 9}


def test_the_environment_sees_whether_the_prompt_of_a_turn_opened_thoughts():
    opening = dataclasses.replace(PROMPT, token_ids=np.array([1, THINK], np.int32))
    client = ScriptedClient([said(4), said(5)], [observed("next"), StepResult()])
    asyncio.run(MultiTurnProgram(max_turns=2, max_tokens=50).run(opening, client))
    assert [each.opened_thoughts for each in client.seen] == ["<think>", ""]
    assert [each.final_text for each in client.seen] == ["", "e"]


def test_two_rollouts_of_one_prompt_are_two_conversations():
    ids = set()
    for _ in range(2):
        client = ScriptedClient([said(4)], [StepResult()])
        play(client)
        ids.add(client.seen[0].id)
    assert len(ids) == 2


def test_a_completion_cut_off_is_scored_and_ends_the_rollout_as_truncated():
    client = ScriptedClient([said(4, 5, 6, 7, reason="length")], [observed(reward=0.25)])
    rollout = play(client)
    assert client.seen[0].truncated
    assert (rollout.status, rollout.stop_reason, rollout.reward) == ("truncated", "length", 0.25)


def test_the_turn_limit_ends_a_game_that_goes_on():
    rollout = play(ScriptedClient([said(4), said(5)], [observed(), observed()]), max_turns=2)
    assert (len(rollout.turns), rollout.status) == (2, "truncated")


def test_completions_never_pass_the_token_limit():
    client = ScriptedClient([said(4)], [StepResult()])
    play(client, max_tokens=5)
    assert client.asked[0].max_new_tokens == 2


def test_an_observation_that_does_not_fit_ends_the_rollout():
    rollout = play(ScriptedClient([said(4)], [observed()]), max_tokens=5)
    assert (rollout.tokens.tolist(), rollout.status) == ([1, 2, 3, 4], "truncated")


def test_a_prompt_that_fills_the_limit_says_so():
    with pytest.raises(ValueError, match="prompt has 3 tokens; a rollout may have 3"):
        play(ScriptedClient([], []), max_tokens=3)


def test_an_environment_may_set_the_next_stop_strings():
    client = ScriptedClient([said(4), said(5)], [observed(stop_strings=("</call>",)), StepResult()])
    play(client)
    assert [sampling.stop_strings for sampling in client.asked] == [(), ("</call>",)]


def test_a_limit_of_the_next_turn_holds_for_that_turn_alone():
    client = ScriptedClient([said(4), said(5), said(6)], [observed(max_new_tokens=2), observed(), StepResult()])
    play(client)
    assert [sampling.max_new_tokens for sampling in client.asked] == [4, 2, 4]


def test_the_limit_of_a_turn_is_never_above_the_configured_one():
    client = ScriptedClient([said(4), said(5)], [observed(max_new_tokens=50), StepResult()])
    play(client)
    assert [sampling.max_new_tokens for sampling in client.asked] == [4, 4]


def test_the_environment_sees_the_calls_of_a_turn():
    client = ScriptedClient([said(8), said(5)], [observed(), StepResult()])
    play(client)
    assert [conversation.tool_calls for conversation in client.seen] == [(ToolCall("h", {}),), ()]


def test_a_turn_is_recorded_with_a_call_that_cannot_be_read():
    rollout = play(ScriptedClient([said(8), said(8, 9)], [observed(), StepResult()]))
    assert [turn.has_invalid_call for turn in rollout.turns] == [False, True]
    turns = json.loads(rollout_record(PROMPT, 0, rollout).tobytes())["turns"]
    assert [turn.get("has_invalid_call", False) for turn in turns] == [False, True]


def test_an_environment_that_goes_on_without_an_observation_is_refused():
    with pytest.raises(ValueError, match="no observation"):
        play(ScriptedClient([said(4)], [StepResult(done=False)]))


def test_a_rewritten_history_begins_a_segment_and_an_appended_one_does_not():
    client = ScriptedClient(
        [said(4, 5), said(6, version=4), said(7, version=4)],
        [observed("on", reward=0.5), observed("forget"), StepResult(reward=1.0)],
    )
    rollout = play(client, split=True)
    assert client.contexts == [[1, 2, 3], [1, 2, 3, 4, 5, 63], [1, 65]]
    assert rollout.segments == (7, 3)
    assert [row.tolist() for row in rollout.by_segment(rollout.tokens)] == [[1, 2, 3, 4, 5, 63, 6], [1, 65, 7]]
    assert rollout.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0, 1]
    assert rollout.generation_logprobs.tolist() == [0, 0, 0, -1, -2, 0, -1, 0, 0, -1]
    assert rollout.spans == (WeightSpan(3, 2), WeightSpan(4, 1), WeightSpan(4, 1))
    assert (rollout.reward, len(rollout.turns)) == (1.5, 3)


def test_the_token_limit_is_that_of_each_segment():
    turns = [said(4, 5), said(6, 7), said(8)]
    client = ScriptedClient(turns, [observed("forget"), observed("forget"), StepResult()])
    rollout = play(client, max_tokens=6, split=True)
    assert [each.max_new_tokens for each in client.asked] == [3, 4, 4]
    assert (rollout.segments, rollout.status) == ((5, 4, 3), "ok")


def test_routing_of_a_segment_is_that_of_its_own_passes():
    turns = [routed(said(4), [10, 11, 12]), routed(said(5), [20, 21])]
    rollout = play(ScriptedClient(turns, [observed("forget"), StepResult()]), split=True)
    assert rollout.routed_experts[:, 0, 0].tolist() == [10, 11, 12, -1, 20, 21, -1]


def shown(following, text, **kwargs):
    """The turn of another agent is next, which sees a text."""
    return StepResult(
        **{"done": False, "next_agent": following, "observation": ({"role": "user", "content": text},), **kwargs}
    )


def test_players_see_their_own_conversations_and_have_rollouts_of_their_own():
    client = ScriptedClient(
        [said(4), said(5), said(6)],
        [
            shown("second", "your turn", agent="first", reward=0.5),
            shown("first", "again", agent_rewards={"first": 0.25}),
            StepResult(reward=1.0, agent_rewards={"second": {"reward": -1.0, "lost": 1.0}}),
        ],
    )
    first, second = play(client)
    assert client.contexts == [[1, 2, 3], [61], [1, 2, 3, 4, 51]]
    assert [(each.agent, each.turn, len(each.messages)) for each in client.seen] == [
        ("", 0, 2),
        ("second", 1, 2),
        ("first", 2, 4),
    ]
    assert len({each.id for each in client.seen}) == 1
    assert (first.agent, first.tokens.tolist(), dict(first.rewards)) == ("first", [1, 2, 3, 4, 51, 6], {"reward": 1.75})
    assert (second.agent, second.tokens.tolist()) == ("second", [61, 5])
    assert dict(second.rewards) == {"reward": -1.0, "lost": 1.0}
    assert [turn.observation for turn in first.turns] == [({"role": "user", "content": "again"},), None]
    # The reward that an opponent's move earned belongs to the turn before it.
    assert [(turn.num_sampled, turn.late_reward) for turn in first.turns] == [(1, 0.25), (1, 0.0)]
    assert [(turn.num_sampled, turn.late_reward) for turn in second.turns] == [(1, -1.0)]


def test_the_limit_of_turns_is_that_of_each_player_and_cuts_the_one_who_would_go_on():
    client = ScriptedClient([said(4), said(5)], [shown("second", "go", agent="first"), shown("first", "go")])
    first, second = play(client, max_turns=1)
    assert (first.status, second.status) == ("truncated", "ok")


def test_a_turn_that_is_cut_off_ends_the_play_of_all():
    client = ScriptedClient(
        [said(4), said(5, reason="length")], [shown("second", "go", agent="first"), shown("first", "go")]
    )
    first, second = play(client)
    assert (first.status, second.status) == ("ok", "truncated")


def test_a_reward_for_a_player_without_a_turn_is_dropped():
    rollout = play(ScriptedClient([said(4)], [StepResult(agent="first", agent_rewards={"second": -1.0})]))
    assert rollout.agent == "first"


def test_an_answer_to_a_turn_that_another_agent_took_is_refused():
    client = ScriptedClient([said(4), said(5)], [shown("second", "go", agent="first"), StepResult(agent="first")])
    with pytest.raises(ValueError, match="'second' took it"):
        play(client)
