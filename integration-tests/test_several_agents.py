"""Agents that train together on tiny games, through the real loop, rollout worker, programs and environments.

The policy is a table: for each message that it answers, the logits of its possible replies. Its gradient is exact, so
that hundreds of steps take seconds, and what is learned follows from the advantages alone. A run of a tiny model plays
against its older versions.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from runs import by_transformers, figures, rollouts_of

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.loop import train
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.worker import worker as worker_module
from rl_algos.rollouts.worker.programs import PROGRAMS
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.tiny_model import END, make_tokenizer
from rl_core.data.batch import TOKENS
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights
from rl_envs.games.number_games import Nim, ProposedSums
from rl_envs.games.plugin import NimConfig, ProposedSumsConfig

SEEDS = partly_exhaustive([1, 2, 3], always=[1])
TOKENIZER = make_tokenizer()
STONES = range(2, 10)


class Table(FakeModel):
    """A policy of one distribution of replies for each message.

    Args:
        logits: Logits by reply, by message.
        lr: Size of a step along the gradient.
    """

    def __init__(self, logits: Mapping[str, Mapping[str, float]], *, lr: float) -> None:
        super().__init__()
        self.replies = {asked: list(replies) for asked, replies in logits.items()}
        self.logits = {asked: np.array(list(replies.values())) for asked, replies in logits.items()}
        self.lr = lr

    def probabilities(self, asked: str) -> np.ndarray:
        weights = np.exp(self.logits[asked] - self.logits[asked].max())
        return weights / weights.sum()

    def probability(self, asked: str, reply: str) -> float:
        return float(self.probabilities(asked)[self.replies[asked].index(reply)])

    def train_step(self, batch, loss):
        """Ascend the mean of advantage times logprob over all turns."""
        rows = zip(
            batch.ragged(TOKENS), batch.ragged(LOSS_MASK), batch.array("advantages").astype(np.float64), strict=True
        )
        gradient = {asked: np.zeros(len(replies)) for asked, replies in self.replies.items()}
        num_turns = 0
        for tokens, mask, advantage in rows:
            starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
            for start in starts:
                asked = _asked(tokens[:start])
                reply = TOKENIZER.decode(tokens[start:].tolist(), skip_special_tokens=False).partition(END)[0]
                place = self.replies[asked].index(reply)
                gradient[asked] += advantage * (np.eye(len(self.replies[asked]))[place] - self.probabilities(asked))
                num_turns += 1
        for asked, direction in gradient.items():
            self.logits[asked] = self.logits[asked] + self.lr * direction / max(num_turns, 1)
        return super().train_step(batch, loss)


class TableGenerator:
    """Samples from a table."""

    num_ranks = 1

    def __init__(self, table: Table) -> None:
        self.table = table

    async def generate(self, request):
        asked = _asked(request.token_ids)
        chosen = np.random.default_rng(request.seed).choice(
            len(self.table.replies[asked]), p=self.table.probabilities(asked)
        )
        said = TOKENIZER.encode(self.table.replies[asked][chosen] + END, add_special_tokens=False)
        return Completion(
            np.array(said, np.int32), np.zeros(len(said), np.float32), "stop", (WeightSpan(1, len(said)),)
        )


def _asked(tokens: Sequence[int]) -> str:
    """The last message of the user."""
    text = TOKENIZER.decode(list(tokens), skip_special_tokens=False)
    return text.rpartition("<|user|>")[2].partition(END)[0]


class Client:
    """An environment of this process."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.states = environment, {}

    async def step(self, conversation):
        (result,) = self.environment.step([conversation], [self.states.pop(conversation.id, None)])
        self.states[conversation.id] = result.state
        return result

    async def abandon(self, ids):
        for each in ids:
            self.states.pop(each, None)


class Source(FakeRolloutSource):
    """Groups by a rollout worker."""

    def __init__(self, prompts, make_worker, *, num_generations, seed):
        super().__init__(prompts, lambda prompt, tokens: 0.0, num_generations=num_generations)
        self.make_worker, self.seed = make_worker, seed

    def collect(self, num_groups, *, num_later=None):
        start = self._position
        prompts = self.prompts[start : start + num_groups]
        self._position += len(prompts)
        return asyncio.run(self._rolled_out(range(start, self._position), prompts))

    async def _rolled_out(self, draws, prompts):
        worker, sampling = self.make_worker(), SamplingParams(max_new_tokens=8)
        tasks = []
        for draw, each in zip(draws, prompts, strict=True):
            seeds = np.random.SeedSequence((self.seed, draw)).generate_state(self.num_generations)
            tasks.append(RolloutTask(each, sampling, tuple(map(int, seeds))))
        await worker.begin(list(zip(draws, tasks, strict=True)))
        groups = {}
        while len(groups) < len(tasks):
            reports, columns, records = await worker.finished()
            parts = columns.with_columns(records.columns).split([len(report.rollouts) for _, report in reports])
            for (draw, report), part in zip(reports, parts, strict=True):
                groups[draw] = RolloutGroup(prompts[draw - draws.start], report.rollouts, part)
        return [groups[draw] for draw in draws]


def prompt(number: int, asked: str, **info: Any) -> Prompt:
    tokens = TOKENIZER.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)
    ids = np.array(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens, np.int32)
    return Prompt(f"p{number}", ({"role": "user", "content": asked},), ids, "game", info)


@pytest.fixture
def learn(monkeypatch):
    """Train a table, and return what every step recorded."""
    real = worker_module.resolve
    monkeypatch.setattr(worker_module, "load_tokenizer", lambda *_: TOKENIZER)
    monkeypatch.setattr(worker_module, "resolve", lambda path: TableGenerator if path == "table" else real(path))

    def run(table, environment, prompts, *, program="multi_turn", seed, args=None, **settings):
        config = GRPOConfig(**settings)
        spec = RolloutWorkerSpec(
            generator="table",
            generator_args=(table,),
            program=PROGRAMS[program],
            program_args={"max_turns": 12, "max_tokens": 200, **(args or {})},
            tokenizer=TokenizerConfig(),
            model_name="none",
        )
        source = Source(
            prompts,
            lambda: RolloutWorker(spec, {"game": Client(environment)}),
            num_generations=config.num_generations_per_prompt,
            seed=seed,
        )
        recorded = FakeRun()
        validation = Validation([], SamplingParams(max_new_tokens=8), config)
        steps = RolloutSteps(config, source, FakeWeights(table), validation, recorded)
        objective = Objective(PolicyLoss(on_policy=True))
        plays = config.num_prompts_per_step * config.num_generations_per_prompt
        train(config, objective, policy=table, steps=steps, rows_per_minibatch=plays)
        return [recorded.metrics[step] for step in sorted(recorded.metrics)]

    return run


def ends(rows, name, count=5):
    """The mean of a metric over the first steps, and over the last."""
    values = [row[name] for row in rows if name in row]
    return np.mean(values[:count]), np.mean(values[-count:])


@pytest.mark.parametrize("seed", SEEDS)
def test_self_play_finds_the_winning_moves_of_both_players(learn, seed):
    table = Table({str(stones): dict.fromkeys("1234", 0.0) for stones in range(1, 10)}, lr=25.0)
    drawn = np.random.default_rng(seed).choice(STONES, 4000)
    prompts = [prompt(number, str(pile), pile=int(pile), max_take=3) for number, pile in enumerate(drawn)]
    rows = learn(
        table,
        Nim(NimConfig()),
        prompts,
        seed=seed,
        num_prompts_per_step=8,
        num_generations_per_prompt=8,
        max_num_steps=30,
    )
    start, end = ends(rows, "environment/accuracy")
    assert start < 0.6
    assert end > 0.9
    assert ends(rows, "environment/valid")[1] > 0.97
    # piles that the first player can win are 3 in 4, and then the second player cannot: both rewards go there
    assert ends(rows, "agent/first/reward")[1] > ends(rows, "agent/first/reward")[0] + 0.3
    assert ends(rows, "agent/second/reward")[1] < 0
    best = {stones: table.probability(str(stones), str(stones % 4)) for stones in STONES if stones % 4}
    assert min(best.values()) > 0.8, best


PROPOSALS = {"1+1": 2, "2+2": 4, "3+4": 7, "4+5": 9, "9+9": None, "8+7": None}
"""Sums and the one-digit replies that solve them, if any."""

PRETRAINED = "1+1"


def solved(table: Table) -> dict[str, float]:
    """The probability that each sum is solved."""
    return {
        asked: 0.0 if answer is None else table.probability(f"{asked}=", str(answer))
        for asked, answer in PROPOSALS.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_proposer_finds_what_can_be_learned_and_solvers_learn_it(learn, seed):
    digits = dict.fromkeys("0123456789", 0.0)
    logits: dict[str, dict[str, float]] = {"?": dict.fromkeys(PROPOSALS, 0.0)}
    for asked, answer in PROPOSALS.items():
        known = {} if answer is None else {str(answer): math.log(9 * 99) if asked == PRETRAINED else math.log(9 / 4)}
        logits[f"{asked}="] = {**digits, **known}
    table = Table(logits, lr=4.0)
    learnable = ["2+2", "3+4", "4+5"]
    assert np.allclose([solved(table)[each] for each in learnable], 0.2)
    rows = learn(
        table,
        ProposedSums(ProposedSumsConfig()),
        [prompt(number, "?", max_operand=9) for number in range(20)],
        program="proposer_solver",
        args={"num_solvers": 4},
        seed=seed,
        num_prompts_per_step=1,
        num_generations_per_prompt=32,
        max_num_steps=20,
    )
    # neither what is known nor what is impossible, which were half of the proposals
    assert sum(table.probability("?", each) for each in learnable) > 0.75
    assert min(solved(table)[each] for each in learnable) > 0.85
    assert solved(table)[PRETRAINED] > 0.95
    start, end = ends(rows, "agent/solver/reward", 3)
    assert end > start + 0.4
    # the proposer earns more and more, until what it proposes has been learned
    earned = [row["agent/proposer/reward"] for row in rows]
    peak = max(np.convolve(earned, np.full(3, 1 / 3), "valid"))
    start, end = ends(rows, "agent/proposer/reward", 3)
    assert peak > start + 0.1
    assert end < peak - 0.25


LARGER = """
from rl_core import StepResult


class Larger:
    def __init__(self):
        self.first = None

    def step(self, response: str):
        if self.first is None:
            self.first = response
            go = {"role": "user", "content": "1+1="}
            return StepResult(done=False, agent="first", next_agent="second", observation=(go,))
        won = (response > self.first) - (response < self.first)
        return StepResult(reward=won, agent="second", agent_rewards={"first": -won})
"""

SETTINGS = """
defaults: grpo-arithmetic
policy:
  train_global_batch_size: 8
  max_total_sequence_length: 64
  optimizer: {kwargs: {lr: 1.0e-3}}
  generation: {backend: hf, max_new_tokens: 3}
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 8
  max_num_steps: 9
  max_rollout_turns: 2
  val_period: 0
  val_at_end: true
  rollout_program_args: {first_agent: first}
  agents:
    first: {opponent: {update_every: 2, share: 0.5}}
    second: {opponent: {update_every: 2, share: 0.5}}
data:
  train: {data_path: HERE/prompts.jsonl, env_name: "HERE/larger.py:Larger"}
  validation: {data_path: HERE/prompts.jsonl, env_name: "HERE/larger.py:Larger"}
checkpointing: {save_period: 3, keep_top_k: null, metric_name: null}
cluster: {cpu_ranks_per_node: 1}
"""

BY_TRANSFORMERS = """
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

checkpoint, version = Path(sys.argv[1]), Path(sys.argv[2])
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint / "hf"), dtype=torch.float32)
weights = {name: tensor for shard in version.rglob("*.safetensors") for name, tensor in load_file(shard).items()}
missing, unexpected = model.load_state_dict(weights, strict=False)
assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
model.tie_weights()
model.eval()
with np.load(version / "written.npz") as arrays, torch.inference_mode():
    rows, offsets, expected, _ = (arrays[f"array_{place}"] for place in range(4))
    for start, end in zip(offsets[:-1], offsets[1:]):
        row = torch.from_numpy(rows[start:end]).long()
        logprobs = model(row[None]).logits[0].log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected[start + 1 : end], atol=1e-4)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint / "hf")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True)
    tokens = list(asked["input_ids"] if hasattr(asked, "keys") else asked)
    before = len(tokens)
    while len(tokens) < before + 3 and tokens[-1] != tokenizer.eos_token_id:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    print(json.dumps(tokenizer.decode(tokens[before:], skip_special_tokens=True)))
"""
"""Compares what an engine was held to with transformers, and prints what the weights answer greedily."""


def games_of(folder):
    """Who played with which weights and said what, by step."""
    shown = ("prompt_id", "index", "play", "agent", "weight_versions", "rewards", "advantage")
    return {
        step: [
            {**{name: row[name] for name in shown}, "opponent": row.get("opponent", False), "said": row["turns"]}
            for row in rows
        ]
        for step, rows in rollouts_of(folder).items()
    }


@exhaustive
def test_a_resumed_run_goes_on_against_the_same_opponents(driver, tmp_path):
    recipe = tmp_path / "larger.yaml"
    recipe.write_text(SETTINGS.replace("HERE", str(tmp_path)))
    (tmp_path / "larger.py").write_text(LARGER)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(18)))
    folder = tmp_path / "run"
    driver.train(folder, str(recipe), "grpo.max_num_steps=5")
    # as if it had been killed then
    shutil.rmtree(folder / "checkpoints" / "step_5")
    undisturbed, measured = games_of(folder), figures(folder)
    driver.train(folder, str(recipe))

    # steps after the checkpoint were made again, the fifth against a version that was taken again
    games, figures_again = games_of(folder), figures(folder)
    assert {step: games[step] for step in undisturbed} == undisturbed
    assert {step: figures_again[step] for step in measured} == measured
    assert len(games) == 9
    for step, rows in games.items():
        opponents = [row for row in rows if row["opponent"]]
        assert {row["agent"] for row in opponents} == {"first", "second"}
        assert {row["advantage"] for row in opponents} == {None}
        assert {tuple(row["weight_versions"]) for row in opponents} == {(1 + 2 * ((step - 1) // 2),)}
        assert {tuple(row["weight_versions"]) for row in rows if not row["opponent"]} == {(step,)}
        # If every play of a prompt ends after its first turn, each is one rollout, and plays have no numbers.
        plays = [(row["prompt_id"], row["index"] if row["play"] is None else row["play"]) for row in opponents]
        assert len(set(plays)) == len(plays)

    checkpoint = folder / "checkpoints" / "step_9"
    (version,) = (checkpoint / "opponents").glob("version_*")
    assert version.name == "version_9"
    said = json.loads(by_transformers(BY_TRANSFORMERS, checkpoint, version))
    validated = [json.loads(line) for line in (folder / "rollouts" / "val_9.jsonl").read_text().splitlines()]
    of_opponent = [row for row in validated if row.get("opponent") and row["agent"] == "second"]
    assert {tuple(row["weight_versions"]) for row in of_opponent} == {(9,)}
    assert {row["turns"][0]["text"] for row in of_opponent} == {said}
    assert not (folder / "opponents").exists()
