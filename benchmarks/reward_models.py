"""Scores of rollouts by a reward model as a role of a run, next to the environment `reward_model`.

    uv run --group cpu benchmarks/reward_models.py [--rollouts N] [--group N] [--quick]

Groups of completions of one prompt are scored by both, block by block in turn: by the environment in its pool with its
defaults, and by `RewardModelJudge` on data-parallel ranks, one for each core. Both get messages and return numbers, so
rendering and tokenising count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch
from measurement import surroundings, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from rl_algos.judges.config import RewardModelJudgeConfig
from rl_algos.judges.reward_model import JudgeTokenizer, RewardModelJudge
from rl_algos.judges.rubrics import Rubric
from rl_core.environments.pool import EnvironmentPool
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.rollouts.environment import Conversation, EnvironmentFailure
from rl_core.rollouts.judging import JudgedRollout
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_dtensor.config import DTensorConfig
from rl_dtensor.worker import DTensorWorker
from rl_envs.reward_model.plugin import PLUGIN, RewardModelConfig

NUM_WORDS = 100_000
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous) -> DTensorWorker:
    """Build one rank of the judge."""
    return DTensorWorker(config, DTensorConfig(), spec, rendezvous)


def make_model(folder: Path, *, is_small: bool) -> int:
    """Write a random classifier whose tokens are words, and return its number of parameters.

    As in other small models with a large vocabulary, most of its 64M parameters are embeddings.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *(f"w{index}" for index in range(NUM_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2} if is_small else {"hidden_size": 512, "num_hidden_layers": 4}
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.05,
        **size,
    )
    model = Qwen3ForSequenceClassification(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_groups(num_groups: int, group_size: int, *, prompt_tokens: int, seed: int) -> list[list[JudgedRollout]]:
    """Return groups of completions whose lengths are log-normal: 48 words in the middle, from 4 to 384."""
    rng = np.random.default_rng(seed)

    def words(count: int) -> str:
        return " ".join(f"w{word}" for word in rng.integers(0, NUM_WORDS, count))

    groups = []
    for _ in range(num_groups):
        prompt = ({"role": "user", "content": words(prompt_tokens)},)
        lengths = np.clip(np.exp(rng.normal(np.log(48), 0.8, group_size)), 4, 384).astype(int)
        groups.append([JudgedRollout(prompt, ({"role": "assistant", "content": words(each)},)) for each in lengths])
    return groups


def scores_by_judge(judge: RewardModelJudge, groups: Sequence[Sequence[JudgedRollout]]) -> list[float]:
    """Score groups at once."""
    found = judge.judge({"score": Rubric("helpful")}, groups)
    values = [reward["score"].value for group in found for reward in group]
    assert all(value is not None for value in values)
    return [value for value in values if value is not None]


async def scores_by_environment(pool: EnvironmentPool, groups: Sequence[Sequence[JudgedRollout]]) -> list[float]:
    """Score rollouts as the rollout worker does when all of them end at about the same time."""
    conversations = [
        Conversation(
            id=f"{time.monotonic_ns()}-{number}-{place}",
            messages=(*rollout.prompt, *rollout.messages),
            info={},
            completion=str(rollout.messages[-1]["content"]),
        )
        for number, group in enumerate(groups)
        for place, rollout in enumerate(group)
    ]
    outcomes = await pool.step(conversations)
    failed = [outcome for outcome in outcomes if isinstance(outcome, EnvironmentFailure)]
    assert not failed, failed[0]
    return [outcome.reward for outcome in outcomes if not isinstance(outcome, EnvironmentFailure)]


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all that it started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@contextmanager
def opened_judge(folder: Path, num_ranks: int) -> Iterator[RewardModelJudge]:
    """Yield the judge on data-parallel ranks of one thread each."""
    settings = {"kind": "reward_model", "model_name": str(folder), "precision": "float32"}
    config = RewardModelJudgeConfig.model_validate(settings)
    spec = ModelSpec(role="reward_model", trains=False)
    with RankPool(num_ranks) as ranks, PooledModel(ranks, "reward_models:build", config, spec, num_ranks) as model:
        yield RewardModelJudge("helpful", model, JudgeTokenizer.load("helpful", config), config)


def measure(given: argparse.Namespace, folder: Path) -> None:
    """Score blocks of groups by both in turn, and print times, tokens and the largest difference of a score."""
    num_parameters = make_model(folder, is_small=given.quick)
    num_groups = max(1, given.rollouts // given.group)
    groups = make_groups(num_groups, given.group, prompt_tokens=given.prompt, seed=given.seed)
    wall: dict[str, list[float]] = {"environment": [], "judge": []}
    spent: dict[str, list[float]] = {"environment": [], "judge": []}
    loop = asyncio.new_event_loop()
    pool = EnvironmentPool.of(PLUGIN.environment, RewardModelConfig(model=str(folder)), "reward_model")
    differences: list[float] = []
    with opened_judge(folder, given.ranks) as judge:
        loop.run_until_complete(pool.start())
        ways: dict[str, Callable[[Sequence[Sequence[JudgedRollout]]], list[float]]] = {
            "environment": lambda block: loop.run_until_complete(scores_by_environment(pool, block)),
            "judge": lambda block: scores_by_judge(judge, block),
        }
        warm = make_groups(given.ranks, given.group, prompt_tokens=32, seed=given.seed + 1)
        for way in ways.values():
            way(warm)
        for number, start in enumerate(range(0, num_groups, given.block)):
            block, found = groups[start : start + given.block], {}
            for name in list(ways)[:: 1 if number % 2 else -1]:
                before, begun = processor_seconds(), time.perf_counter()
                found[name] = ways[name](block)
                wall[name].append(time.perf_counter() - begun)
                spent[name].append(processor_seconds() - before)
            differences += np.abs(np.subtract(found["environment"], found["judge"])).tolist()
    loop.run_until_complete(pool.close())
    lengths = [[len(str(each.messages[-1]["content"]).split()) + 2 for each in group] for group in groups]
    prompt = given.prompt + 2
    padded = sum(len(group) * (prompt + max(group)) for group in lengths)
    needed = sum(prompt + sum(group) for group in lengths)
    rollouts = num_groups * given.group
    print(
        f"A classifier of {num_parameters / 1e6:.0f}M parameters in float32; {rollouts} rollouts in groups of "
        f"{given.group}, prompts of {prompt} tokens, completions of {min(map(min, lengths))} to "
        f"{max(map(max, lengths))} tokens (mean {statistics.mean(each for group in lengths for each in group):.0f}), "
        f"none of them equal; {given.ranks} ranks of one thread.\n"
    )
    rows = []
    for name, values in {"wall seconds": wall, "processor seconds": spent}.items():
        ratios = [one / other for one, other in zip(values["environment"], values["judge"], strict=True)]
        one, other = sum(values["environment"]), sum(values["judge"])
        blocks = f"{one / other:.1f} (blocks: {min(ratios):.1f} to {max(ratios):.1f})"
        rows.append([name, f"{one:.1f}", f"{other:.1f}", blocks])
    rows.append(["tokens computed", str(padded), str(needed), f"{padded / needed:.1f}"])
    print(table(["", "environment, its defaults", "judge", "ratio"], rows))
    print(f"\nLargest difference of a score: {max(differences):.1e} (the environment rounds to 4 digits).")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rollouts", type=int, default=512, help="number of rollouts")
    arguments.add_argument("--group", type=int, default=16, help="completions of a prompt")
    arguments.add_argument("--prompt", type=int, default=320, help="words of a prompt")
    arguments.add_argument("--block", type=int, default=8, help="groups that each scores at once, in turn")
    arguments.add_argument("--ranks", type=int, default=min(os.cpu_count() or 1, 8), help="ranks of the judge")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--quick", action="store_true", help="a small model and few rollouts, to show that it runs")
    given = arguments.parse_args()
    if given.quick:
        given.rollouts = 4 * given.group
    print(surroundings("torch", "transformers"), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
