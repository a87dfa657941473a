"""Random conversations with tools, against an engine that keeps what it consumed and produced."""

import asyncio
import json
from functools import cache

import numpy as np
import pytest
from chat_tokenizers import CHARACTERS, tokenizer_of

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_algos.tokenizer import encode_prompt, render
from rl_core.environments.tool_environment import ToolEnvironment
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

CONVERSATIONS = 150
FAMILIES = ("qwen3", "qwen3_6", "llama3_1", "mistral", "deepseek_v3", "glm4_moe", "gpt_oss")
WRITTEN = {
    "qwen3": "<tool_call>\n{}\n</tool_call>",
    "qwen3_6": "<tool_call>\n<function=echo>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>",
    "llama3_1": "{}",
    "mistral": "[TOOL_CALLS][{}]",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>echo\n```json\n{}\n```<｜tool▁call▁end｜>",
    "glm4_moe": "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "gpt_oss": "<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{}",
}
"""Calls, with the place of the call's JSON, of its arguments' JSON or of the argument itself."""
ALWAYS_REWRITTEN = {"qwen3_6", "glm4_moe", "gpt_oss", "mistral"}
"""Templates that write every earlier turn in another way than the policy does here."""
CALL_ENDS = {"llama3_1": "<|eom_id|>", "glm4_moe": "<|observation|>", "gpt_oss": "<|call|>"}


def echo(text: str) -> str:
    """Repeat a text."""
    return f"{text}!"


ENVIRONMENT = ToolEnvironment([echo], lambda response: float(len(response)))
TEXT = [each for each in CHARACTERS if each not in "<>[]{}|\\\"'"]


@cache
def chat_of(family):
    return Chat(tokenizer_of(family))


def play(family, count, **settings):
    """The engine and the rollout of so many conversations."""
    played = []

    async def play_all():
        for seed in range(count):
            engine = ScriptedEngine(family, chat_of(family), np.random.default_rng(seed))
            messages, tools = ({"role": "user", "content": engine.some_text()},), tuple(ENVIRONMENT.tools)
            tokens = encode_prompt(tokenizer_of(family), messages, tools)
            prompt = Prompt("p", messages, tokens, "tools", tools=tools)
            rollout = await MultiTurnProgram(max_turns=4, max_tokens=2000, **settings).run(prompt, engine)
            played.append((engine, rollout))

    asyncio.run(play_all())
    return played


class ScriptedEngine:
    """Answers with random turns, some with calls, malformed calls, thoughts or a stop string instead of an end."""

    sampling = SamplingParams(max_new_tokens=400)

    def __init__(self, family, chat, random):
        self.family, self.chat, self.random = family, chat, random
        self.tokenizer = tokenizer_of(family)
        self.consumed, self.produced, self.observed, self.conversations = [], [], [], []
        self._state = None

    def some_text(self):
        return "".join(self.random.choice(TEXT, self.random.integers(1, 20)))

    def some_turn(self):
        thought = "<think>\nHm.\n</think>\n\n" if self.family.startswith("qwen") and self.random.random() < 0.5 else ""
        end = self.tokenizer.eos_token if self.random.random() < 0.8 else ""
        if self.random.random() < 0.3:
            return thought + self.some_text() + end
        argument = self.some_text() if self.family in ("qwen3_6", "glm4_moe") else "abc"
        filled = {
            "deepseek_v3": json.dumps({"text": argument}),
            "gpt_oss": json.dumps({"text": argument}),
            "qwen3_6": argument,
            "glm4_moe": argument,
            "llama3_1": json.dumps({"name": "echo", "parameters": {"text": argument}}),
        }.get(self.family, json.dumps({"name": "echo", "arguments": {"text": argument}}))
        if self.random.random() < 0.2:
            filled = filled[:-1] + "?"
        written = WRITTEN[self.family].replace("{}", filled)
        return thought + written + (CALL_ENDS.get(self.family, self.tokenizer.eos_token) if end else "")

    async def generate(self, token_ids, sampling=None):
        self.consumed.append(np.array(token_ids))
        sampled = np.array(self.tokenizer.encode(self.some_turn(), add_special_tokens=False), np.int32)
        self.produced.append(sampled)
        logprobs = -self.random.random(len(sampled)).astype(np.float32) - 1
        return Completion(sampled, logprobs, "stop", (WeightSpan(1, len(sampled)),))

    async def step(self, conversation):
        [result] = ENVIRONMENT.step([conversation], [self._state])
        self._state = result.state
        if result.done and self.random.random() < 0.5:
            # a game that goes on after an answer
            return StepResult(done=False, observation=({"role": "user", "content": self.some_text()},))
        return result

    def read(self, token_ids):
        return self.chat.read(token_ids, ENVIRONMENT.tools)

    def shown(self, token_ids):
        return self.chat.shown(token_ids)

    def continuation(self, turn, observation, sampled):
        self.observed.append(self.chat.continuation(turn, observation, sampled))
        return self.observed[-1]

    def rendered(self, messages, so_far):
        self.conversations.append(list(messages))
        return self.chat.rendered(messages, so_far, ENVIRONMENT.tools)


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_tokens_are_those_that_the_engine_consumed_and_produced(family):
    num_turns = []
    for engine, rollout in play(family, CONVERSATIONS):
        num_turns.append(len(rollout.turns))
        # every request begins with all that was consumed and produced before, unchanged
        for earlier, sampled, later in zip(engine.consumed, engine.produced, engine.consumed[1:], strict=False):
            assert later[: len(earlier) + len(sampled)].tolist() == [*earlier, *sampled]
        assert rollout.tokens.tolist() == [*engine.consumed[-1], *engine.produced[-1]]
        sampled = np.zeros(len(rollout.tokens), np.uint8)
        for earlier, turn in zip(engine.consumed, engine.produced, strict=True):
            sampled[len(earlier) : len(earlier) + len(turn)] = 1
        assert rollout.loss_mask.tolist() == sampled.tolist()
        assert ((rollout.generation_logprobs < 0) == (sampled > 0)).all()
        assert rollout.num_sampled == sum(span.num_tokens for span in rollout.spans)
    assert set(num_turns) == {1, 2, 3, 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_are_what_the_engine_consumed_and_produced_at_each_turn(family):
    num_segments, kept = [], 0
    for engine, rollout in play(family, 40, split=True):
        rows: list[list[int]] = []
        masks: list[list[int]] = []
        for consumed, sampled in zip(engine.consumed, engine.produced, strict=True):
            if rows and consumed[: len(rows[-1])].tolist() == rows[-1]:
                kept += 1
                masks[-1] += [0] * (len(consumed) - len(rows[-1])) + [1] * len(sampled)
                rows[-1] = [*consumed, *sampled]
            else:
                rows.append([*consumed, *sampled])
                masks.append([0] * len(consumed) + [1] * len(sampled))
        assert [row.tolist() for row in rollout.by_segment(rollout.tokens)] == rows
        assert [row.tolist() for row in rollout.by_segment(rollout.loss_mask)] == masks
        assert ((rollout.generation_logprobs < 0) == (rollout.loss_mask > 0)).all()
        num_segments.append(len(rows))
    assert max(num_segments) > 1
    assert bool(kept) == (family not in ALWAYS_REWRITTEN)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_of_a_split_conversation_begins_with_what_the_template_renders(family):
    tokenizer = tokenizer_of(family)
    for engine, rollout in play(family, 15, split=True):
        assert len(rollout.turns) == len(engine.consumed)
        # the prompt itself was rendered before
        for consumed, messages in zip(engine.consumed[1:], engine.conversations, strict=True):
            text = render(tokenizer, messages, add_generation_prompt=True, tools=ENVIRONMENT.tools)
            assert tokenizer.decode(consumed, skip_special_tokens=False) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_conversations_have_calls_that_work_and_calls_that_do_not(family):
    results = [
        message["content"]
        for _, rollout in play(family, 30)
        for turn in rollout.turns
        for message in turn.observation or ()
        if message["role"] == "tool"
    ]
    errors = [each for each in results if each.startswith("Error")]
    assert len(results) > len(errors) >= (0 if family in ("qwen3_6", "glm4_moe") else 1)
