"""Advice on a run: rules over its metrics, each with a threshold and a remedy with its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rl_algos.evaluation.summary import listed
from rl_algos.rollouts.mismatch import CAUSES, CLOSED, MIN_CLOSED, MISMATCH_KL
from rl_core.config.keys import value_at
from rl_core.errors import RLError
from rl_launch.run_session.guardrails import read_events
from rl_launch.run_session.tracking.progress import imbalance, steady

MIN_STEPS = 8
"""Steps before trends are judged, and before the phases are, as the first steps compile and warm up."""

MIN_STEPS_OF_REWARDS = 30
"""Steps before a reward is called flat: learning rates of RL move it by less than its noise in fewer."""

FLAT_REWARD = 0.05
"""The reward is flat if it moves by less than this share of its own spread between the halves of a run."""

UNMOVED_LOSS = 0.01
"""A loss has not moved if it differs by less than this share between the first and the last quarter."""

NO_SIGNAL = 0.6
"""Share of groups whose rewards are all equal, beyond which most generation is wasted."""

ALL_EQUAL = 0.95
"""Share of groups with equal rewards, beyond which sampling until groups differ finds hardly any."""

COLLAPSED_REWARD = 0.25
"""The reward has collapsed if it lost more than this share of the spread that it had."""

MIN_WITH_SIGNAL = 3
"""Steps with different rewards that a run had before it can have collapsed."""

COLLAPSED_ENTROPY = 0.2
"""The entropy has collapsed if the last quarter of a run has less than this share of the first."""

LARGE_KL = 0.1
"""Mean KL divergence from the reference policy, in nats per token, beyond which the policy has moved far."""

TRUNCATED = 0.1
"""Share of rollouts that reach the token limit."""

FAILED = 0.05
"""Share of rollouts that fail."""

CLIPPED = 0.3
"""Share of tokens whose ratio is clipped."""

EFFECTIVE_SAMPLES = 0.5
"""Share of the sampled tokens that the importance weights leave in effect."""

RISEN_REWARD = 0.5
"""Increase of the mean reward since the first quarter, in its standard deviations, with which a loss of entropy is
learning."""

OVERFIT = 0.05
"""Rise of the validation loss above its least, as a share of that."""

DOMINATES = {"generation": 0.7, "training": 0.7, "logprobs": 0.4, "validation": 0.3, "data": 0.2, "weight_sync": 0.25}
"""Share of the time, by phase, beyond which there is advice."""

MAX_EQUAL = 0.75
"""Nothing is learned in a run if all rewards are equal in more than this share of its steps."""

PROMPTS = "num_prompts_per_step"
"""Key of the section with the settings of rollouts."""

STALE_DRAFTER = 0.7
"""A drafter is left behind if its rate of accepted tokens falls below this share of the rate at first."""

_IGNORED = "rollout/ignored/"

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Advice:
    """Something to look at.

    Args:
        found: The finding, with the figures.
        remedy: What to try, naming keys.
        metrics: Metrics that show it, the first one most directly.
        where: Conditions on the rollouts that show it, as `rl show --where` takes them; empty if none do.
        is_only_shown: True if guardrails do not act on it: no earlier checkpoint is better, because it holds from the
            beginning, costs only single rollouts, or comes with learning, as groups whose rewards are all right.
    """

    found: str
    remedy: str
    metrics: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    is_only_shown: bool = False


def advice(
    rows: Rows, timings: Mapping[str, float], config: Mapping[str, Any], failures: Mapping[str, int] | None = None
) -> list[Advice]:
    """Return the findings of the rules, most serious first.

    Args:
        rows: The metrics of every step.
        timings: Seconds by phase, `step` for the whole.
        config: Config of the run, as nested plain values.
        failures: Number of failed rollouts by their reason, as far as records of them are kept.
    """
    found = [each for rule in _RULES for each in rule(rows, config)]
    # a run that learns nothing is in no hurry
    slow = [] if _all_equal(rows) or len(rows) < MIN_STEPS else _slow(timings, config)
    return [*_failed(rows, config, failures or {}), *found, *slow]


def acted(run_dir: Path) -> list[Advice]:
    """Return what guardrails have done in a run, each action as something to look at."""
    try:
        events = read_events(run_dir)
    except RLError as error:
        return [Advice(str(error), "see docs/guardrails.md")]
    done = {
        "rollback": "the run went back to step_{back}",
        "lower_staleness": "its rollouts are younger since then",
        "stop": "the run ended",
    }
    return [
        Advice(
            f"{event}; {done[event.action].format(back=event.resumes_after)} after step {event.step}",
            f"its config has since {', '.join(f'{key}={value}' for key, value in event.change.items())}"
            if event.change
            else f"change what broke guardrails.{event.rule}, or the rule",
            metrics=(event.metric,),
        )
        for event in events
    ]


def _failed(rows: Rows, config: Mapping[str, Any], failures: Mapping[str, int]) -> Iterator[Advice]:
    share = _share_of_rollouts("rollout/failed", rows, config)
    steps = [row["step"] for row in rows if row.get("rollout/failed")]
    if not steps:
        return
    count = sum(_values("rollout/failed", rows))
    what = f"{share:.0%} of the rollouts" if share > FAILED else f"{count:.0f} rollouts"
    where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the last of them {steps[-1]}"
    reasons = f": {listed(failures)}" if failures else ""
    agent = _at(config, f"{_section(config)}.agent")
    printed = "what their environment printed in logs/environment-NAME.log"
    if isinstance(agent, Mapping):
        printed = "the output of your agents" if agent.get("external") else "what their agents printed in logs/agents"
    bounds = "; env.NAME.deadline_s and env.NAME.memory_limit_gib bound an environment" if share > FAILED else ""
    yield Advice(
        f"{what} failed, in {where}{reasons}",
        f"see them with rl show RUN --where status=failed --step {steps[-1]}, and {printed}{bounds}",
        metrics=("rollout/failed",),
        where=("status=failed",),
        is_only_shown=share <= FAILED,
    )


def _ignored(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    metrics = sorted({name for row in rows for name in row if name.startswith(_IGNORED)})
    if metrics:
        yield Advice(
            f"agents set {', '.join(name.removeprefix(_IGNORED) for name in metrics)}, without effect",
            "set policy.generation.temperature and the keys next to it instead; agents must work without forced calls",
            metrics=tuple(metrics),
        )


def _skipped(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    skipped = sum(_values("train/skipped_steps", rows))
    if skipped:
        yield Advice(
            f"{skipped:g} optimizer steps were skipped because their gradient was not finite",
            "lower policy.optimizer.kwargs.lr or policy.max_grad_norm, or train with policy.precision=float32",
            metrics=("train/skipped_steps", "train/grad_norm"),
        )


def _mismatch(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _last_quarter("mismatch/kl", rows)
    if values and fmean(values) > MISMATCH_KL:
        examined = [{name: row[name] for name in row if name.startswith(CLOSED)} for row in rows]
        closed = next((each for each in reversed(examined) if each), {"": 0.0})
        name = max(closed, key=lambda each: closed[each] or 0.0)
        found = f"generator and trainer disagree: mismatch/kl is {fmean(values):.2g}, above {MISMATCH_KL}"
        remedy = "find its causes with rl doctor mismatch RUN; correct for it with loss_fn.importance.high=2"
        if (closed[name] or 0.0) >= MIN_CLOSED:
            title, remedy = CAUSES[name.removeprefix(CLOSED)]
            found += f"; {closed[name]:.0%} of the difference is explained by {title}"
        yield Advice(found, remedy, metrics=("mismatch/kl",))


def _waits(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    trainer, generators = (steady(_values(f"idle/{side}", rows)) for side in ("trainer", "generators"))
    found = imbalance(median(trainer or [0.0]), median(generators or [0.0]), section=_section(config))
    if found is not None:
        yield Advice(*found, metrics=("idle/trainer", "idle/generators"))


def _off_policy(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _last_quarter("mismatch/effective_sample_size", rows)
    if values and fmean(values) < EFFECTIVE_SAMPLES:
        yield Advice(
            f"the weights that sampled are far from the policy: {fmean(values):.0%} of the tokens are in effect",
            f"lower {_section(config)}.async_grpo.max_trajectory_age_steps or policy.optimizer.kwargs.lr, or bound the "
            "weights with loss_fn.importance.high",
            metrics=("mismatch/effective_sample_size",),
        )


def _rewards(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    """Return the advice on rewards: a run that collapsed needs none on its rewards since then."""
    collapsed = list(_collapsed(rows, config))
    yield from collapsed or (each for rule in (_nothing_earned, _signal, _flat) for each in rule(rows, config))


def _collapsed(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    num_recent = min(_quarter(rows), MIN_STEPS)
    recent = rows[-num_recent:]
    rewards = _values("reward/mean", recent)
    before = [row for row in rows[:-num_recent] if row.get("reward/std") and row.get("reward/mean") is not None]
    if len(before) < MIN_WITH_SIGNAL or not rewards or _share_without_signal(recent, config) <= ALL_EQUAL:
        return
    lost = fmean(row["reward/mean"] for row in before) - fmean(rewards)
    if lost <= COLLAPSED_REWARD * fmean(row["reward/std"] for row in before):
        return
    best = max(before, key=lambda row: row["reward/mean"])
    lr = _at(config, "policy.optimizer.kwargs.lr")
    lower = f"policy.optimizer.kwargs.lr={lr / 3:.1g}" if isinstance(lr, int | float) else "policy.optimizer.kwargs.lr"
    yield Advice(
        f"the run collapsed: reward/mean was {best['reward/mean']:.3g} at step {best['step']}, is "
        f"{fmean(rewards):.3g} in the last {len(rewards)} steps, and all groups have equal rewards",
        f"branch from a checkpoint of about step {best['step']} with a lower learning rate: rl train --from RUN:STEP "
        f"{lower}",
        metrics=("reward/mean", "reward/std"),
    )


def _share_without_signal(rows: Rows, config: Mapping[str, Any]) -> float:
    """Return the share of the groups with equal rewards in some steps."""
    groups, prompts = _values("rollout/groups_without_signal", rows), _at(config, f"{_section(config)}.{PROMPTS}")
    if groups and isinstance(prompts, int):
        return min(fmean(groups) / prompts, 1.0)
    spread = _values("reward/std", rows)
    return float(bool(spread) and not any(spread))


def _nothing_earned(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    if not _all_equal(rows):
        return
    rewards = _values("reward/mean", rows)
    reward, num_steps = min(rewards), _num_equal(rows)
    steps = f"{num_steps} steps" if num_steps == len(rewards) else f"{num_steps} of {len(rewards)} steps"
    if reward == 0:
        earned = "has a reward"
        remedy = (
            "Can the environment parse them? rl env check RUN shows what its code looks for, and rl env run RUN scores "
            "a response that you type. If it can, warm up the policy with SFT, or choose easier prompts"
        )
    else:
        earned = f"has a reward other than {reward:.4g}"
        remedy = (
            "Does the environment tell right from wrong? rl env check RUN scores typical answers, and rl env run RUN "
            "one that you type. If all earn the same, correct the reward"
        )
    yield Advice(
        f"no rollout of {steps} {earned}, so nothing is learned",
        f"read the responses in the samples. {remedy}",
        metrics=("reward/mean", "reward/std"),
        is_only_shown=True,
    )


def _all_equal(rows: Rows) -> bool:
    """Return whether all rewards are the same in most steps of a run, and the lowest of the run."""
    return bool(rows) and _num_equal(rows) > MAX_EQUAL * len(rows)


def _num_equal(rows: Rows) -> int:
    """Return the number of steps whose rewards are all the lowest of the run."""
    found = [(row["reward/mean"], row["reward/std"]) for row in rows if {"reward/mean", "reward/std"} <= row.keys()]
    lowest = min((mean for mean, _ in found), default=0.0)
    return sum(each == (lowest, 0) for each in found)


def _signal(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    share, section = _share_without_signal(rows[-_quarter(rows) :], config), _section(config)
    rewards = _last_quarter("reward/mean", rows)
    if share <= NO_SIGNAL or not rewards or _all_equal(rows):
        return
    sample = f", or sample until groups differ: {section}.use_dynamic_sampling=true" if share <= ALL_EQUAL else ""
    yield Advice(
        f"{share:.0%} of the groups have equal rewards and teach nothing (reward/mean {fmean(rewards):.2g})",
        f"choose prompts that are neither too easy nor too hard,{' or' * (not sample)} raise "
        f"{section}.num_generations_per_prompt{sample}",
        metrics=("rollout/groups_without_signal", "reward/mean"),
        is_only_shown=True,
    )


def _flat(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values, spread = _values("reward/mean", rows), _values("reward/std", rows)
    if len(values) < MIN_STEPS_OF_REWARDS or not spread or not fmean(spread) or _all_equal(rows):
        return
    half = len(values) // 2
    moved = fmean(values[half:]) - fmean(values[:half])
    if moved < FLAT_REWARD * fmean(spread):
        what = "falls" if moved < -FLAT_REWARD * fmean(spread) else "is flat"
        yield Advice(
            f"the reward {what}: reward/mean {fmean(values[:half]):.3g} in the first half, "
            f"{fmean(values[half:]):.3g} in the second",
            "see in the samples which responses are rewarded; then try another policy.optimizer.kwargs.lr, or more "
            f"rollouts per prompt ({_section(config)}.num_generations_per_prompt)",
            metrics=("reward/mean", "reward/std"),
            is_only_shown=True,
        )


def _unmoved(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    losses = _values("train/loss", rows)
    # The loss of a policy gradient means nothing, and neither does a loss next to a reward.
    if _values("reward/mean", rows) or len(losses) < 2:
        return
    quarter = max(1, len(losses) // 4)
    first, last = fmean(losses[:quarter]), fmean(losses[-quarter:])
    if abs(first - last) < UNMOVED_LOSS * abs(first):
        yield Advice(
            f"the loss does not decrease: {first:.4g} at first, {last:.4g} after {len(losses)} steps",
            "take more steps (a smaller policy.train_global_batch_size, or more epochs), or raise "
            "policy.optimizer.kwargs.lr: from scratch and with adapters 1e-4 and more are usual, for fine-tuning 1e-5",
            metrics=("train/loss",),
            is_only_shown=True,
        )


def _rises(rows: Rows) -> bool:
    """Return whether the reward has risen since the first quarter of a run, by a share of its spread."""
    spread, first = _values("reward/std", rows), _first_quarter("reward/mean", rows)
    last = _last_quarter("reward/mean", rows)
    return bool(spread and first and last) and fmean(last) - fmean(first) > RISEN_REWARD * fmean(spread)


def _entropy(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    first, last = _first_quarter("policy/nll", rows), _last_quarter("policy/nll", rows)
    # A policy that solves its task becomes certain.
    if _rises(rows):
        return
    if len(rows) >= MIN_STEPS and first and fmean(last) < COLLAPSED_ENTROPY * fmean(first):
        yield Advice(
            f"the entropy collapsed: policy/nll {fmean(first):.2g} at first, {fmean(last):.2g} now {_means(last)}",
            "widen the upper clip (loss_fn.surrogate.clip_high=0.28), lower policy.optimizer.kwargs.lr, or hold the "
            "policy to its reference with loss_fn.kl.weight",
            metrics=("policy/nll",),
        )


def _kl(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _last_quarter("policy/kl", rows)
    first = _first_quarter("policy/kl", rows)
    if values and fmean(values) > LARGE_KL and fmean(values) > fmean(first):
        yield Advice(
            f"the policy drifts from its reference: policy/kl grew from {fmean(first):.2g} to {fmean(values):.2g} "
            f"{_means(values)}",
            "raise loss_fn.kl.weight, or lower policy.optimizer.kwargs.lr",
            metrics=("policy/kl",),
        )


def _clipped(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _last_quarter("policy/clipped", rows)
    if values and fmean(values) > CLIPPED:
        yield Advice(
            f"{fmean(values):.0%} of the tokens are clipped, so they do not contribute to the loss",
            "take fewer updates per step (a larger policy.train_global_batch_size), or lower "
            "policy.optimizer.kwargs.lr",
            metrics=("policy/clipped",),
        )


def _truncated(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    values = _last_quarter("rollout/truncated", rows)
    if values and fmean(values) > TRUNCATED:
        limit, section = _at(config, "policy.generation.max_new_tokens"), _section(config)
        yield Advice(
            f"{fmean(values):.0%} of the rollouts reach the token limit",
            f"raise policy.generation.max_new_tokens{f' (it is {limit})' if limit else ''}, leave such rollouts out "
            f"with {section}.overlong_filtering=true, or reward shorter ones with "
            f"{section}.reward_shaping.enabled=true",
            metrics=("rollout/truncated", "rollout/mean_length"),
            where=("stop_reason=length",),
        )


def _speculation(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    section = "policy.generation.vllm_cfg.speculation"
    gained = _last_quarter("speculation/tokens_per_step", rows)
    break_even = _at(config, f"{section}.min_tokens_per_step")
    if gained and isinstance(break_even, int | float) and fmean(gained) < break_even:
        yield Advice(
            f"speculative decoding does not pay: requests get {fmean(gained):.2f} tokens per engine step, and "
            f"{break_even:g} are the break-even",
            f"remove {section}, lower its num_tokens, or name a drafter that is closer to the policy; if engine steps "
            "with drafts take less time than you stated, lower min_tokens_per_step",
            metrics=("speculation/tokens_per_step", "speculation/acceptance_rate"),
        )
        return
    rate = "speculation/acceptance_rate"
    first, last = _first_quarter(rate, rows), _last_quarter(rate, rows)
    # n-grams of the row are never left behind
    has_weights = _at(config, f"{section}.model") is not None
    if has_weights and len(rows) >= MIN_STEPS and first and fmean(last) < STALE_DRAFTER * fmean(first):
        drafter = "policy.draft_head" if _at(config, f"{section}.method") in ("eagle3", "mtp") else "drafter"
        trains = _at(config, f"{drafter}.model_name") is not None
        follow = f"Raise {drafter}.optimizer.kwargs.lr" if trains else f"Add the section {drafter}, so that it trains"
        yield Advice(
            f"the policy leaves its drafter behind: {fmean(first):.0%} of the drafted tokens were accepted at first, "
            f"{fmean(last):.0%} now {_means(last)}",
            f"what is sampled stays exact, but slower. {follow}, or lower num_tokens",
            metrics=(rate, "speculation/tokens_per_step"),
        )


def _overfit(rows: Rows, config: Mapping[str, Any]) -> Iterator[Advice]:
    seen = [(row["step"], row["val/loss"]) for row in rows if row.get("val/loss") is not None]
    if len(seen) < 3:
        return
    step, least = min(seen, key=lambda each: each[1])
    if seen[-1][1] > (1 + OVERFIT) * least and step < seen[-1][0]:
        yield Advice(
            f"the validation loss increases: {least:.4g} at step {step}, {seen[-1][1]:.4g} at step {seen[-1][0]}",
            "keep the best checkpoint (checkpointing.metric_name=val:loss with checkpointing.higher_is_better=false), "
            "and end earlier: sft.max_num_steps or sft.stop_at_validation_loss",
            metrics=("val/loss", "train/loss"),
        )


_RULES: tuple[Callable[[Rows, Mapping[str, Any]], Iterator[Advice]], ...] = (
    _skipped,
    _mismatch,
    _waits,
    _off_policy,
    _rewards,
    _unmoved,
    _entropy,
    _kl,
    _clipped,
    _truncated,
    _speculation,
    _overfit,
    _ignored,
)


def _slow(timings: Mapping[str, float], config: Mapping[str, Any]) -> Iterator[Advice]:
    backend = _at(config, "policy.generation.backend") or "vllm"
    remedies = {
        "generation": "give it devices of its own (policy.generation.colocated.enabled=false), more devices "
        f"(cluster.gpus_per_node), more memory or rows at a time (policy.generation.{backend}_cfg), fewer tokens "
        "(policy.generation.max_new_tokens), or, if a few long rollouts take most of the time, steps that end before "
        f"these ({_section(config)}.over_sampling_ratio)",
        "training": "raise policy.train_micro_batch_size (or policy.sequence_packing.train_mb_tokens) as far as memory "
        "allows",
        "logprobs": "raise policy.logprob_batch_size (or policy.sequence_packing.logprob_mb_tokens) as far as memory "
        "allows",
        "weight_sync": f"take more prompts per step ({_section(config)}.num_prompts_per_step): a sync takes as long "
        "for any number",
        "validation": "validate less often or on fewer prompts: the keys val_period and max_val_samples",
        "data": "tokenise in separate processes: data.num_workers",
    }
    if _at(config, f"{_section(config)}.agent") is not None:
        # the engine may have little to do meanwhile
        remedies["generation"] = (
            "it includes the start and the work of the agents and their tools. With logger.monitoring_enabled=true, "
            "running_requests of the replicas shows whether the engine waits for them: then keep the imports of an "
            f"agent small, or play more rollouts at a time ({_section(config)}.{PROMPTS})"
        )
    if _at(config, f"{_section(config)}.async_grpo.enabled"):
        # The phase is then a wait, and other metrics show more about it.
        del remedies["generation"]
    whole = timings.get("step", 0.0)
    for phase, remedy in remedies.items():
        seconds = timings.get(phase, 0.0)
        # training alone is all that fine-tuning does
        is_all = phase == "training" and "generation" not in timings
        if seconds > DOMINATES[phase] * whole and not is_all:
            yield Advice(
                f"{phase} takes {seconds / whole:.0%} of the time", remedy, metrics=(f"time/{phase}", "time/step")
            )


def _share_of_rollouts(name: str, rows: Rows, config: Mapping[str, Any]) -> float:
    counts = _last_quarter(name, rows)
    section = _section(config)
    prompts, each = (_at(config, f"{section}.{key}") for key in (PROMPTS, "num_generations_per_prompt"))
    if not counts or not isinstance(prompts, int) or not isinstance(each, int):
        return 0.0
    return fmean(counts) / (prompts * each)


def _section(config: Mapping[str, Any]) -> str:
    """Return the section with the keys of rollouts."""
    found = (key for key, section in config.items() if isinstance(section, Mapping) and PROMPTS in section)
    return next(found, "grpo")


def _values(name: str, rows: Rows) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _means(quarter: Sequence[float]) -> str:
    """Return what two numbers are that a quarter at each end of a run has."""
    steps = f"{len(quarter)} steps" if len(quarter) > 1 else "step"
    return f"(means of the first and the last {steps})"


def _quarter(values: Sequence[Any]) -> int:
    return max(1, len(values) // 4)


def _first_quarter(name: str, rows: Rows) -> list[float]:
    values = _values(name, rows)
    return values[: _quarter(values)]


def _last_quarter(name: str, rows: Rows) -> list[float]:
    values = _values(name, rows)
    return values[-_quarter(values) :] if values else []


def _at(config: Mapping[str, Any], key: str) -> Any:
    return value_at(config, tuple(key.split(".")))
