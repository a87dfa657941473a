"""Judges tried without a run: `rl judge agree`, and the rewards by judges in `rl env check`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rl_algos.evaluation.estimates import Estimate
from rl_algos.judges.agreement import Agreement, agreement, read_labels
from rl_algos.judges.config import EndpointJudgeConfig, JudgeConfig, judge_sections, judged_rewards
from rl_algos.judges.service import JudgeService
from rl_core.environments.conformance import Finding
from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.judging import JudgedRollout
from rl_launch.commands.environments.source import GivenEnvironment
from rl_launch.run_config.reading import read_plan
from rl_launch.worker_envs.node_build import default_root

MAX_BYTES = 2**28
"""Maximum size of a file with labels."""
IDLE_ANSWER = "I do not know."
"""Answer to any prompt that a judge must not like."""

_MEANINGS = {
    "accuracy": "share of rows whose verdict is the label",
    "kappa": "agreement above chance (Cohen's kappa)",
    "length_bias": "preference for longer responses, above that of people",
    "order_changes": "share of pairs whose verdict changes with the order",
    "first_bias": "preference for the response that is shown first",
}


def local_service(judges: Mapping[str, JudgeConfig]) -> JudgeService:
    """Return a service that asks the judges of a config that need no run: those behind a URL. It shares its cache with
    runs."""
    endpoints = {name: judge for name, judge in judges.items() if isinstance(judge, EndpointJudgeConfig)}
    return JudgeService(endpoints, default_root().parent / "verdicts")


def judge_findings(given: GivenEnvironment, responses: Sequence[str] = ()) -> list[Finding]:
    """Return a finding for each reward by a judge of an environment: its rewards of two answers to the first row, or of
    the responses that the user gives in addition."""
    row = given.rows[0]
    texts = list(dict.fromkeys([row.attempts()[0].conversation.completion, IDLE_ANSWER, *responses]))
    group = [JudgedRollout(row.messages, ({"role": "assistant", "content": text},), row.fields) for text in texts]
    later = [Finding("judge", f"{name} asks a reward model, which needs a run", "skipped") for name in given.later]
    return [*(_finding(given, name, texts, group) for name in given.rewards), *later]


def _finding(given: GivenEnvironment, name: str, texts: Sequence[str], group: Sequence[JudgedRollout]) -> Finding:
    rubric = given.rewards[name]
    judge = given.judges[rubric.judge]
    if not isinstance(judge, EndpointJudgeConfig):
        return Finding("judge", f"{name}: judges.{rubric.judge} is a {judge.kind}, which needs a run", "skipped")

    async def asked() -> Any:
        async with local_service({rubric.judge: judge}) as service:
            return await service.judge({name: rubric}, group)

    rewards = [each[name] for each in asyncio.run(asked())]
    if failure := next((each.failure for each in rewards if each.failure), ""):
        return Finding(
            "judge", f"{name}: {failure}", "failed", "a rollout without a verdict fails; see docs/checking-judges.md"
        )
    values = [float(each.value or 0) for each in rewards]
    shown = ", ".join(f"{value:g} for {text!r:.40}" for value, text in zip(values, texts, strict=True))
    if len(set(values)) == 1:
        remedy = "pass a response that must earn more with --response TEXT; if it earns the same, change the rubric"
        return Finding("judge", f"{name} is the same for different answers: {shown}", "warned", remedy)
    return Finding("judge", f"{name}: {shown}")


def judge_agreement(file: Path, source: str, overrides: Sequence[str], reward: str = "") -> tuple[str, Agreement]:
    """Compare a judge with the labels of people.

    Args:
        file: JSONL file; see `rl_algos.judges.agreement.read_labels`.
        source: Recipe, YAML file or run directory with the judge and a reward that it gives.
        overrides: Config keys to set.
        reward: The reward, as `ENVIRONMENT.NAME`; may be empty if the config has one.

    Returns:
        The key of the reward and the agreement.

    Raises:
        ConfigError: If there is no such reward, or its judge needs a run.
        DataError: If the file cannot be read.
        JudgeBudgetSpent: If the budget of the judge is spent.
    """
    config: Any = read_plan(source, overrides).config
    by_environment = judged_rewards(config) if hasattr(config, "judges") else {}
    known = {f"{name}.{part}": rubric for name, parts in by_environment.items() for part, rubric in parts.items()}
    if not known:
        raise ConfigError(f"{source} has no reward by a judge. Add env.NAME.rewards.right={{judge: JUDGE}}")
    if not reward and len(known) > 1:
        raise ConfigError(f"{source} has several rewards by judges. Pass one with --reward: {', '.join(known)}")
    key = reward or next(iter(known))
    if key not in known:
        raise ConfigError(f"--reward: got {key}; allowed: {', '.join(known)}")
    rubric = known[key]
    judge = judge_sections(config)[rubric.judge]
    if not isinstance(judge, EndpointJudgeConfig):
        raise ConfigError(
            f"judges.{rubric.judge} is a {judge.kind}, which needs the engines of a run. Serve the model, and compare "
            "it as a judge with kind: endpoint"
        )
    rows = read_labels(_lines(file), file.name)

    async def compared() -> Agreement:
        async with local_service({rubric.judge: judge}) as service:
            return await agreement(service, rubric, rows)

    return f"env.{key.replace('.', '.rewards.', 1)}", asyncio.run(compared())


def _lines(file: Path) -> list[str]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise DataError(f"{file} is larger than {MAX_BYTES >> 20} MiB. Use a part of it")
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None


def agreement_text(key: str, found: Agreement) -> str:
    """Return a line for each estimate, with its interval and meaning, and the reasons of rows without a verdict."""
    lines = [f"{key}: {found.num_rows} rows with a verdict, {found.num_failed} without"]
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Estimate):
            interval = f"[{value.low:.3f}, {value.high:.3f}]"
            lines.append(f"{field.name:14} {value.value:6.3f} {interval:16} {_MEANINGS[field.name]}")
    lines += [f"without a verdict: {reason}" for reason in found.failures[:5]]
    return "\n".join(lines) + "\n"


def agreement_json(key: str, found: Agreement) -> dict[str, Any]:
    """Return the agreement as plain values."""
    return {"schema": 1, "reward": key, **asdict(found)}
