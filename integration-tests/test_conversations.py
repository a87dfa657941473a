"""Conversations of several turns, with the results of tools, as vLLM sampled them and as the trainer reads them."""

import zlib

import numpy as np
from runs import rollouts_of, steps_of

from rl_algos.tiny_model import make_tokenizer
from rl_algos.tokenizer import encode_prompt
from rl_core.rollouts.record import turns_of
from rl_core.testing.exhaustive import exhaustive

ENVIRONMENT = '''
import zlib

from rl_core.rollouts.environment import StepResult

RESULTS = (
    ({"role": "tool", "content": "12+7="},),
    ({"role": "tool", "content": "Error: no such tool"}, {"role": "user", "content": "3+4="}),
    ({"role": "user", "content": "Once more: 20+5="},),
)


class Talk:
    """Goes on for up to four turns; what it answers, and where the next turn stops, follows from the turn."""

    def step(self, conversations, states):
        return [self.answer(each) for each in conversations]

    def answer(self, turn):
        drawn = zlib.crc32(f"{turn.turn} {turn.completion}".encode())
        reward = sum(character in "13579" for character in turn.completion) / 8
        if turn.turn == 3 or drawn % 4 == 0:
            return StepResult(reward=reward)
        stops = ("1", "2") if drawn % 3 else None
        return StepResult(reward=reward, done=False, observation=RESULTS[drawn // 4 % 3], stop_strings=stops)

    def close(self, states):
        pass
'''


AGENT = """
import asyncio

import aiohttp


async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:

        async def ask(*more):
            body = {"messages": [*prompt["messages"], *more]}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                return (await response.json())["choices"][0]["message"]

        first, again = await ask(), {"role": "user", "content": "12+7="}
        pair = await asyncio.gather(ask(first, again), ask(first, again))
        other = await ask({"role": "user", "content": "20+5="})
        return sum(character in "13579" for said in (first, *pair, other) for character in said["content"]) / 8
"""


@exhaustive
def test_the_logprobs_of_agents_with_parallel_calls_are_those_of_the_engine(driver, warm_model, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    driver.train(
        tmp_path / "run",
        "grpo-agent-tiny",
        f"policy.model_name={warm_model}",
        f"grpo.agent.run={tmp_path / 'agent.py'}:run",
        "data.validation=null",
        "grpo.num_prompts_per_step=8",
        "grpo.max_num_steps=3",
        "grpo.val_period=0",
        "checkpointing.enabled=false",
        "checkpointing.metric_name=null",
        "cluster.cpu_ranks_per_node=1",
    )
    for line in steps_of(tmp_path / "run"):
        assert line["rollout/failed"] == 0
        assert line["train/grad_norm"] > 0
        assert line["mismatch/max"] < 1e-3
    rollouts = [row for rows in rollouts_of(tmp_path / "run").values() for row in rows]
    assert len(rollouts) == 3 * 64
    assert {len(turns_of(row)) for row in rollouts} == {4}  # the first turn is in two branches, and there once


@exhaustive
def test_the_logprobs_of_a_thousand_conversations_are_those_of_the_engine(driver, warm_model, tmp_path):
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    driver.train(
        tmp_path / "run",
        "grpo-arithmetic",
        f"policy.model_name={warm_model}",
        f"data.train.env_name={tmp_path / 'talk.py'}:Talk",
        "data.validation=null",
        "policy.max_total_sequence_length=160",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 512, logprob_mb_tokens: 512}",
        "grpo={num_prompts_per_step: 64, num_generations_per_prompt: 8, max_rollout_turns: 4, max_num_steps: 2}",
        "grpo.val_period=0",
        "checkpointing.enabled=false",
        "checkpointing.metric_name=null",
        "cluster.cpu_ranks_per_node=1",
    )
    for line in steps_of(tmp_path / "run"):
        assert line["rollout/failed"] == 0
        assert line["mismatch/max"] < 1e-3
    rollouts = [row for rows in rollouts_of(tmp_path / "run").values() for row in rows]
    assert len(rollouts) == 1024
    assert {len(row["turns"]) for row in rollouts} == {1, 2, 3, 4}
    turns = [turn for row in rollouts for turn in row["turns"]]
    assert {message["role"] for turn in turns for message in turn["observation"] or ()} == {"tool", "user"}
    # turns that a stop string ended, which no end of turn follows in what was sampled
    after_stops = [
        later["text"]
        for row in rollouts
        for number, (turn, later) in enumerate(zip(row["turns"], row["turns"][1:], strict=False))
        if zlib.crc32(f"{number} {turn['text']}".encode()) % 3
    ]
    assert any(text[:-1].isdigit() and text[-1:] in ("1", "2") for text in after_stops)


SHORTENING = (
    "{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>' -}}"
    "{{- message.content[-1:] if message.role == 'assistant' else message.content -}}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Drops all of an earlier turn but its last character, as templates of reasoning models drop thoughts."""


# rl-algos compares the segments of rewritten histories with what a fake engine read
@exhaustive
def test_a_rewritten_history_is_trained_on_as_the_engine_read_it_at_each_turn(driver, warm_model, tmp_path):
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    (tmp_path / "shortening.jinja").write_text(SHORTENING)
    driver.train(
        tmp_path / "run",
        "grpo-arithmetic",
        f"policy.model_name={warm_model}",
        f"policy.tokenizer.chat_template={tmp_path / 'shortening.jinja'}",
        f"data.train.env_name={tmp_path / 'talk.py'}:Talk",
        "data.validation=null",
        "policy.max_total_sequence_length=160",
        "policy.train_global_batch_size=24",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 256, logprob_mb_tokens: 256}",
        "grpo={num_prompts_per_step: 12, num_generations_per_prompt: 4, max_rollout_turns: 4, max_num_steps: 2}",
        "grpo.rewritten_history=split",
        "grpo.val_period=0",
        "loss_fn={surrogate: gspo, aggregation: sequence-mean}",
        "checkpointing.enabled=false",
        "checkpointing.metric_name=null",
    )
    for line in steps_of(tmp_path / "run"):
        assert line["rollout/failed"] == 0
        assert line["mismatch/max"] < 1e-3
        assert line["rollout/segments"] > 1
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHORTENING
    rollouts = [row for rows in rollouts_of(tmp_path / "run").values() for row in rows]
    assert len(rollouts) == 96
    for rollout in rollouts:
        begins = np.cumsum([0, *(each["num_tokens"] for each in rollout.get("segments", []))])
        messages = list(rollout["prompt"])
        # a span of sampled tokens for each turn: what lies before it in its row is the conversation so far
        for turn, span in zip(rollout["turns"], rollout["weight_spans"], strict=True):
            row_begin = begins[begins <= span["start"]][-1]
            assert span["start"] - row_begin == len(encode_prompt(tokenizer, messages))
            messages += [{"role": "assistant", "content": turn["text"]}, *(turn["observation"] or ())]
    # turns of one character are not rewritten, and do not begin a segment
    assert any(len(rollout.get("segments", [0])) < len(rollout["turns"]) for rollout in rollouts)
