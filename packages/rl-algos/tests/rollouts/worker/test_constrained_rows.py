"""Rows that ask for a form of the turns: their tokens, the allowed sets in the batch, and what training reads."""

import asyncio
import json

import numpy as np
import pytest
import torch
from chat_tokenizers import tokenizer_of

from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.training.metrics import rollout_metrics
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.client import PlayClient, PlayServices
from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_algos.tokenizer import encode_prompt
from rl_core.model import Read
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.grammar import TokenGrammars
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, WeightSpan
from rl_core.token_filter import ALLOWED, TokenFilter
from rl_core.torch.heads.logprobs import Head
from rl_core.torch.heads.reads import language_reads
from rl_core.torch.rows import to_rows

TOKENIZER = tokenizer_of("qwen2_5")
STOP = TOKENIZER.eos_token_id
LOGITS = np.random.default_rng(3).normal(0, 2, len(TOKENIZER))
FORMAT = {"type": "json_schema", "json_schema": {"name": "kind", "schema": {"enum": ["a", "bc"]}}}
READ = Read("logprobs", token_filter=TokenFilter(allowed=True))


class Engine:
    """Draws every token from one distribution, within the grammar of the request."""

    grammars = TokenGrammars(TOKENIZER)

    async def generate(self, request):
        rng, sampling, tokens, logprobs = np.random.default_rng(request.seed), request.sampling, [], []
        state = self.grammars.begin(sampling.grammar, sampling.stop_token_ids) if sampling.grammar else None
        while len(tokens) < sampling.max_new_tokens and STOP not in tokens:
            words = None if state is None else state.allowed()
            bits = np.ones(len(LOGITS)) if words is None else np.unpackbits(words.view(np.uint8), bitorder="little")
            weights = np.exp(LOGITS) * bits[: len(LOGITS)]
            tokens.append(int(rng.choice(len(LOGITS), p=weights / weights.sum())))
            logprobs.append(np.log(weights[tokens[-1]] / weights.sum()))
            if state is not None:
                state.accept(tokens[-1])
        reason = "stop" if STOP in tokens else "length"
        spans = (WeightSpan(1, len(tokens)),)
        return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), reason, spans)


class Asks:
    async def step(self, conversation):
        again = conversation.turn == 0
        return StepResult(1.0, done=not again, observation=({"role": "user", "content": "again"},) if again else ())

    async def abandon(self, conversation_ids):
        pass


def play(structured_output, response_format, seed=5):
    asked = ({"role": "user", "content": "?"},)
    prompt = Prompt("p0", asked, encode_prompt(TOKENIZER, list(asked)), "game", {"response_format": response_format})
    services = PlayServices(Engine(), Chat(TOKENIZER), {"game": Asks()}, max_steps=1)
    client = PlayClient(services, prompt, SamplingParams(60, stop_token_ids=(STOP,)), seed, RolloutTurns(), {})
    program = MultiTurnProgram(max_turns=2, max_tokens=300, structured_output=structured_output)
    return prompt, asyncio.run(program.run(prompt, client))


def batch_of(*rollouts):
    groups = [RolloutGroup.of(prompt, [rollout]) for prompt, rollout in rollouts]
    return groups, build_batch(groups, GRPOConfig(structured_output="constrain"))


def trained_logprobs(batch):
    """What a head reads that gives every position the engine's logits."""
    rows = to_rows(batch.only(["tokens", ALLOWED]).local(), torch.device("cpu"))
    head = Head(torch.from_numpy(LOGITS)[:, None])
    return language_reads(torch.ones(rows.num_tokens, 1, dtype=torch.float64), rows, head, [READ], temperature=1.0)


def test_training_reads_the_probabilities_that_constrained_tokens_were_drawn_with():
    plays = [play("constrain", FORMAT), play("constrain", None), play("constrain", FORMAT, seed=8)]
    failed = plays[0][0], Rollout.failed(plays[0][0], "lost")
    _, batch = batch_of(*plays, failed)
    mask = batch.ragged("loss_mask").values == 1
    read = trained_logprobs(batch)["logprobs"].numpy()
    np.testing.assert_allclose(read[mask], batch.ragged("generation_logprobs").values[mask], atol=1e-6)
    assert [len(row) > 0 for row in batch.ragged(ALLOWED)] == [True, False, True, False]
    for _, rollout in (plays[0], plays[2]):
        assert {json.loads(turn.text) for turn in rollout.turns} <= {"a", "bc"}


def test_a_step_without_constrained_turns_has_the_column_nevertheless():
    groups, batch = batch_of(play("constrain", None), play("constrain", None, seed=6))
    assert ALLOWED not in groups[0].columns
    assert [len(row) for row in batch.ragged(ALLOWED)] == [0, 0]
    read = trained_logprobs(batch)["logprobs"].numpy()
    mask = batch.ragged("loss_mask").values == 1
    np.testing.assert_allclose(read[mask], batch.ragged("generation_logprobs").values[mask], atol=1e-6)


def test_rows_that_ask_for_a_form_are_refused_or_counted_without_constraint():
    with pytest.raises(ValueError, match="set structured_output of the algorithm to constrain or ignore"):
        play("refuse", FORMAT)
    prompt, rollout = play("ignore", FORMAT)
    assert rollout.allowed == ()
    metrics = rollout_metrics([RolloutGroup.of(prompt, [rollout])])
    assert metrics["rollout/ignored/response_format"] == 1.0
    with pytest.raises(ValueError, match="is not offered; pass json_schema"):
        play("constrain", {"type": "lark"})
