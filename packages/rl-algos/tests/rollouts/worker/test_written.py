"""Rollouts whose completions are written: the real worker, program and chat, without an engine."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.rollouts.worker.written import WrittenGenerator, make_tokenizer
from rl_algos.tokenizer import encode_prompt
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.group import RECORD
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Prompt

TOOL = {
    "type": "function",
    "function": {"name": "price", "description": "", "parameters": {"properties": {"item": {"type": "string"}}}},
}
TOKENIZER = make_tokenizer()


def writes(*completions):
    waiting = list(completions)

    async def write():
        return waiting.pop(0) if waiting else None

    return write


def completion(text, **sampling):
    generator = WrittenGenerator(writes(text), TOKENIZER)
    request = GenerationRequest(np.zeros(1, np.int32), SamplingParams(**{"max_new_tokens": 1000, **sampling}), 0)
    return asyncio.run(generator.generate(request))


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda text: "<|" not in text))
def test_every_text_comes_back_as_it_was_written(text):
    assert Chat(TOKENIZER).read(completion(text).token_ids).text == text


def test_a_completion_ends_as_an_engines_would():
    assert completion("abc").stop_reason == "stop"
    cut = completion("abcdef", max_new_tokens=3)
    assert (cut.stop_reason, TOKENIZER.decode(cut.token_ids)) == ("length", "abc")
    stopped = completion("a b</answer> c", stop_strings=("</answer>",))
    assert (stopped.stop_reason, TOKENIZER.decode(stopped.token_ids)) == ("stop", "a b</answer>")


class Shop:
    """Answers calls with a price, and ends with the first turn without one."""

    def __init__(self):
        self.seen = []

    async def step(self, conversation):
        self.seen.append(conversation)
        if not conversation.tool_calls:
            return StepResult(reward=float("3" in conversation.completion))
        [call] = conversation.tool_calls
        content = call.error or f"{call.arguments['item']}: 3"
        message = {"role": "tool", "name": "price", "content": content, "tool_call_id": call.id}
        return StepResult(done=False, observation=(message,))

    async def abandon(self, ids):
        pass


def played(tmp_path, *completions):
    """The environment, and the record of a rollout of these completions."""
    TOKENIZER.save_pretrained(tmp_path)
    spec = RolloutWorkerSpec(
        "rl_algos.rollouts.worker.written:WrittenGenerator",
        (writes(*completions), TOKENIZER),
        "rl_algos.rollouts.worker.program:MultiTurnProgram",
        {"max_turns": 5, "max_tokens": 10_000},
        TokenizerConfig(name=str(tmp_path)),
        "",
    )
    messages = ({"role": "user", "content": "What does tea cost? ☕"},)
    tokens = encode_prompt(TOKENIZER, messages, [TOOL])
    prompt = Prompt("0", messages, tokens, "shop", tools=(TOOL,))
    sampling = SamplingParams(max_new_tokens=1000, stop_token_ids=(TOKENIZER.eos_token_id,))
    shop = Shop()

    async def run():
        worker = RolloutWorker(spec, {"shop": shop})
        await worker.start()
        await worker.begin([(0, RolloutTask(prompt, sampling, (0,)))])
        _, _, records = await worker.finished()
        return json.loads(bytes(records.ragged(RECORD)[0]))

    return shop, asyncio.run(run())


def test_written_calls_of_tools_are_read_as_a_models_are(tmp_path):
    call = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
    shop, record = played(tmp_path, f"Let me look. {call}", "<tool_call>{nonsense</tool_call>", "It costs 3.")
    first, second, _ = shop.seen
    assert first.tool_calls[0].arguments == {"item": "tea"}
    assert "not valid JSON" in second.tool_calls[0].error
    assert record["turns"][0]["observation"][0]["content"] == "tea: 3"
    assert (record["status"], record["rewards"]) == ("ok", {"reward": 1.0})


def test_a_conversation_without_its_end_says_that_the_input_ended(tmp_path):
    _, record = played(tmp_path, '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>')
    assert record["status"] == "failed"
    assert "no completion is left" in record["failure"]


@pytest.mark.parametrize("text", ["x", "<|user|> is a token of its own"])
def test_special_tokens_are_not_part_of_what_is_read(text):
    assert Chat(TOKENIZER).read(completion(text).token_ids).text == text.replace("<|user|>", "")
