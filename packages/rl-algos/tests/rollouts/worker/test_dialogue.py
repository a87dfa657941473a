"""Conversations of a person have the tokens that a multi-turn rollout would have."""

import asyncio

import numpy as np
import pytest
from chat_tokenizers import tokenizer_of

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.dialogue import Dialogue
from rl_algos.rollouts.worker.program import MultiTurnProgram, ReplyProgram
from rl_algos.tokenizer import encode_prompt
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

SAID = ("Two.", "<think>\nhm\n</think>\n\nFour.", "Six")
ASKED = ("1 + 1?", "2 + 2?", "3 + 3?")


def sampled_by(tokenizer, end):
    return [np.array(tokenizer.encode(text + end, add_special_tokens=False), np.int32) for text in SAID]


class Client:
    """Samples the same turns, asks the same questions, and keeps what the engine is given."""

    sampling = SamplingParams(max_new_tokens=50)

    def __init__(self, chat, sampled):
        self._chat, self._sampled, self.given = chat, list(sampled), []

    async def generate(self, token_ids, sampling=None):
        self.given.append(np.array(token_ids))
        tokens = self._sampled.pop(0)
        logprobs = np.zeros(len(tokens), np.float32)
        reason = "length" if len(tokens) == sampling.max_new_tokens else "stop"
        return Completion(tokens, logprobs, reason, (WeightSpan(1, len(tokens)),))

    async def step(self, conversation):
        turn = conversation.turn + 1
        observation = ({"role": "user", "content": ASKED[turn]},) if turn < len(ASKED) else ()
        return StepResult(done=not observation, observation=observation)

    def read(self, token_ids):
        return self._chat.read(token_ids)

    def shown(self, token_ids):
        return self._chat.shown(token_ids)

    def continuation(self, turn, observation, sampled):
        return self._chat.continuation(turn, observation, sampled)

    def rendered(self, messages, so_far):
        return self._chat.rendered(messages, so_far)


@pytest.mark.parametrize(
    ("family", "end", "rewrites"),
    [("llama3_1", "<|eot_id|>", False), ("qwen2_5", "<|im_end|>", False), ("qwen3", "<|im_end|>", True)],
)
def test_every_turn_has_the_tokens_of_a_rollout(family, end, rewrites):
    tokenizer = tokenizer_of(family)
    chat, turns = Chat(tokenizer), sampled_by(tokenizer, end)
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED[0]})
    client = Client(chat, turns)
    prompt = Prompt("p", messages, encode_prompt(tokenizer, messages), "")
    asyncio.run(MultiTurnProgram(max_turns=3, max_tokens=10_000, split=rewrites).run(prompt, client))
    dialogue = Dialogue(tokenizer, chat, system="Be brief.")
    for text, given, turn in zip(ASKED, client.given, turns, strict=True):
        assert dialogue.ask(text).tolist() == given.tolist()
        dialogue.answer(turn)
    assert dialogue.num_tokens == len(client.given[-1]) + len(turns[-1])
    assert dialogue.raw.endswith(SAID[-1] + end)
    assert [message["role"] for message in dialogue.messages] == ["system", *["user", "assistant"] * 3]


def test_a_question_without_an_answer_leaves_the_conversation_as_it_was():
    tokenizer = tokenizer_of("llama3_1")
    dialogue, turns = Dialogue(tokenizer, Chat(tokenizer)), sampled_by(tokenizer, "<|eot_id|>")
    dialogue.ask(ASKED[0])
    dialogue.answer(turns[0])
    raw, following = dialogue.raw, dialogue.ask(ASKED[1])
    assert dialogue.raw == raw
    dialogue.ask("something else")
    assert dialogue.ask(ASKED[1]).tolist() == following.tolist()
    dialogue.reset()
    assert (dialogue.num_tokens, dialogue.raw) == (0, "")
    assert dialogue.ask(ASKED[0]).tolist() == encode_prompt(tokenizer, [{"role": "user", "content": ASKED[0]}]).tolist()


def test_a_reply_ends_within_the_tokens_that_are_left():
    tokenizer = tokenizer_of("llama3_1")
    chat, turns = Chat(tokenizer), sampled_by(tokenizer, "<|eot_id|>")
    tokens = encode_prompt(tokenizer, [{"role": "user", "content": ASKED[0]}])
    prompt = Prompt("chat:0", (), tokens, "")
    room = len(turns[0])
    program = ReplyProgram(max_tokens=len(tokens) + room)
    rollout = asyncio.run(program.run(prompt, Client(chat, turns)))
    assert rollout.status == "truncated"
    assert rollout.tokens[len(tokens) :].tolist() == turns[0].tolist()
    rollout = asyncio.run(ReplyProgram(max_tokens=1000).run(prompt, Client(chat, turns)))
    assert (rollout.status, rollout.turns[0].text) == ("ok", SAID[0])
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens"):
        asyncio.run(ReplyProgram(max_tokens=len(tokens)).run(prompt, Client(chat, turns)))
