"""The judges of a run: their process, and their engines in rollout workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from rl_algos.judges.config import GeneratorJudgeConfig
from rl_algos.judges.host import JudgeHostSpec
from rl_algos.judges.judged import JudgingSpec
from rl_algos.judges.needs import POLICY, engine_of
from rl_algos.rollouts.worker.judge_engine import EngineJudgeSpec
from rl_algos.rollouts.worker.opponents import OpponentSpec
from rl_core.model_config import ModelConfig, TokenizerConfig
from rl_core.plugins import OpponentNeed, RolloutNeeds
from rl_launch.worker_envs.node_build import default_root

JUDGE_HOST = "rl_algos.judges.host:JudgeHost"

JUDGES = "judges"
"""Name of the process and of its log."""


def judging_spec(
    needs: RolloutNeeds, policy: ModelConfig, opponents: Sequence[OpponentSpec], *, awaits_weights: bool
) -> JudgingSpec | None:
    """Return the judging of a rollout worker; None without judges.

    Args:
        needs: Needs of the rollout workers.
        policy: The model that its own engine serves.
        opponents: Its further engines.
        awaits_weights: True if the policy's weights are sent to it.
    """
    if not needs.judges and not needs.scored and not needs.later:
        return None
    engines, started = [], {each.need.name for each in opponents}
    for name, judge in needs.judges.items():
        if not isinstance(judge, GeneratorJudgeConfig):
            continue
        is_policy, engine = judge.model_name == POLICY, engine_of(name, judge)
        engines.append(
            EngineJudgeSpec(
                name,
                engine if engine in started else "",
                policy.tokenizer if is_policy else TokenizerConfig(),
                policy.model_name if is_policy else judge.model_name,
                judge.max_new_tokens,
                judge.temperature,
                judge.max_total_sequence_length or policy.max_total_sequence_length,
                awaits_weights=is_policy and awaits_weights,
            )
        )
    weights = {
        environment: {name: reward.weight for name, reward in rewards.items()}
        for environment, rewards in needs.judged.items()
    }
    return JudgingSpec(weights, needs.scored, frozenset(needs.later), tuple(engines))


def longest_judged(needs: RolloutNeeds, engine: OpponentNeed) -> int | None:
    """Return the maximum number of tokens of a judge's engine next to the policy's; None for the policy's own."""
    for name, judge in needs.judges.items():
        if isinstance(judge, GeneratorJudgeConfig) and engine_of(name, judge) == engine.name:
            return judge.max_total_sequence_length
    return None


def host_spec(needs: RolloutNeeds, policy: ModelConfig, folder: Path, is_fixed: bool) -> JudgeHostSpec:
    """Return the spec of the process that asks judges.

    Args:
        needs: Needs of the rollout workers.
        policy: The policy.
        folder: Folder of the run, or of the evaluation.
        is_fixed: True if the weights of the policy never change.
    """
    generators = {name: each for name, each in needs.judges.items() if isinstance(each, GeneratorJudgeConfig)}
    follows = frozenset(name for name, judge in generators.items() if judge.model_name == POLICY)
    versions = {
        name: _files_of(policy.model_name if name in follows else judge.model_name)
        for name, judge in generators.items()
        if is_fixed or name not in follows
    }
    uncached = follows if needs.changes_under_way and not is_fixed else frozenset()
    cache, spent = default_root().parent / "verdicts", folder / "judges.jsonl"
    return JudgeHostSpec(needs.judges, needs.judged, cache, spent, versions, uncached)


def _files_of(model_name: str) -> str:
    """Return a digest of a model and of the sizes and times of its files: its name may be another model's later."""
    folder = Path(model_name).expanduser()
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return hashlib.sha256(json.dumps([model_name, files]).encode()).hexdigest()
