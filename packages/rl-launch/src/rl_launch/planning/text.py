"""A plan for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rl_launch.planning.accelerators import MEMORY
from rl_launch.planning.changes import MAX_RANKS, Change
from rl_launch.planning.learned import Took
from rl_launch.planning.memory import Usage
from rl_launch.planning.plan import Plan

NOT_PHASES = ("step", "callbacks")
"""Seconds that a run records and that are not those of a phase."""
SCHEMA = 1
"""Version of `as_json`; raised when a key changes its meaning or is removed."""


def size(num_bytes: float) -> str:
    """Return bytes in GB, such as `80.8 GB`, or in MB if they are few."""
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3g} MB"


def duration(seconds: float) -> str:
    """Return seconds in words, such as `35 ms`, `1.2 s` or `12 min`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 600:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def verdict(plan: Plan) -> str:
    """Return the verdict in one sentence."""
    title = plan.machines.accelerator.title
    where = f"{plan.num_devices} x {title}"
    fullest, capacity = plan.fullest, plan.capacity
    if fullest is None:
        return f"{plan.recipe} on {where}: not estimated, because {'; '.join(plan.problems)}."
    full = f"{_held(fullest)} takes most, {size(fullest.total)}"
    if capacity is None:
        return f"{plan.recipe} on {where}: {full}."
    full = f"{full} of {size(capacity)}"
    if plan.fits is None:
        return f"{plan.recipe} on {where}: {full}; not all of it is estimated: {'; '.join(plan.problems)}."
    if plan.fits:
        return f"{plan.recipe} fits {where}: {full}."
    others = {usage.role: usage for usage in sorted(plan.usages, key=lambda usage: usage.total)}
    too_large = [usage for role, usage in others.items() if usage.total > capacity and role != fullest.role]
    reasons = "".join(f"; {_held(usage)} takes {size(usage.total)}" for usage in too_large)
    reasons += "".join(f"; {problem}" for problem in plan.problems)
    return f"{plan.recipe} does not fit {where}: {full}{reasons}."


def _held(usage: Usage) -> str:
    return usage.phase if usage.phase == usage.role else f"{usage.phase} of the {usage.role}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rank` or `1,024 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _price(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 0.1 or not amount else f"{amount:.2g}"


def lines(plan: Plan, *, price: float | None, change: Change | None, took: Took | None = None) -> Iterator[str]:
    """Yield a plan as lines of text.

    Args:
        plan: The plan.
        price: Price of an hour of a device; None to leave out the cost.
        change: Smallest change that fits, if the plan does not.
        took: Seconds and memory of the run that is planned, shown next to the plan; None if it has not run.
    """
    yield verdict(plan)
    if plan.fits is False:
        if change is None:
            yield (
                f"No change of microbatches, layout or offloading fits, on up to {MAX_RANKS:,} GPUs. Lower "
                "max_total_sequence_length, train adapters (lora_cfg.enabled), or choose larger GPUs."
            )
        else:
            cost = f" ({change.remark})" if change.remark else ""
            yield f"The smallest change that fits{cost}: {change.overrides}"
            if change.plan.seconds:
                yield f"  a step then takes {duration(change.plan.step_seconds)}"
    yield ""
    for role in plan.roles:
        if role.rank is not None:
            layout = role.rank.layout
            sizes = (("tensor", layout.tensor), ("context", layout.context), ("pipeline", layout.pipeline))
            split = " x ".join(f"{name} {count}" for name, count in (*sizes, ("experts", layout.experts)) if count > 1)
            shared = f"data {layout.data}{' x ' if split else ''}{split}"
            again = f"; {role.recomputed} recomputed" if role.recomputed is not None else ""
            yield f"{role.role}: {role.name}, {role.basis}, {counted(role.ranks, 'rank')} ({shared}){again}"
    if plan.engine is not None:
        ranks, replicas = plan.engine.layout.num_ranks, plan.topology.num_replicas
        own = "its own devices" if plan.topology.own.get("generation") else "the devices of the models"
        yield f"generation: {counted(replicas, 'replica')} of {counted(ranks, 'rank')} on {own}"
    if not plan.usages:
        return
    yield ""
    yield "Memory of the fullest rank, GB:"
    for usage in sorted(plan.usages, key=lambda usage: -usage.total):
        learned = plan.factors.memory.get(usage.phase)
        yield f"  {usage.role + ', ' + usage.phase:<30} {usage.total / 1e9:>8,.3g}{_factor(plan, learned)}"
        if took is not None and (peak := took.memory.get((usage.role, usage.phase))):
            yield f"    {'measured, of tensors':<28} {peak / 1e9:>8,.3g}  planned {usage.tensors / 1e9:,.3g}"
        for name, taken in usage.device.items():
            yield f"    {name:<28} {taken / 1e9:>8,.3g}"
    yield f"  {'host memory of a node':<30} {plan.host_bytes / 1e9:>8,.3g}"
    for name, taken in plan.host.items():
        yield f"    {name:<28} {taken / 1e9:>8,.3g}"
    if plan.checkpoint_bytes and plan.num_checkpoints != 0:
        count = plan.num_checkpoints
        kept = "all are kept" if count is None else f"up to {count} at a time, {size(plan.checkpoint_bytes * count)}"
        yield f"  {'a checkpoint on disk':<30} {plan.checkpoint_bytes / 1e9:>8,.3g}  {kept}"
    if not plan.seconds:
        return
    yield ""
    measured = {} if took is None else took.seconds
    head = f"A step of {plan.work.num_rows:,} rows, {plan.work.num_tokens:,.0f} tokens:"
    yield f"{head:<41} measured" if measured else head

    def row(phase: str, planned: str) -> str:
        shown = f" {duration(measured[phase]) if phase in measured else '':>8}" if measured else ""
        return f"  {phase:<30} {planned:>8}{shown}".rstrip()

    for phase, seconds in plan.seconds.items():
        yield row(phase, duration(seconds)) + _factor(plan, plan.factors.of(phase))
    for phase in (phase for phase in measured if phase not in plan.seconds and phase not in NOT_PHASES):
        yield row(phase, "-")
    total = f"{plan.tokens_per_second:,.0f} tokens/s"
    device = "GPU" if plan.device.runs_on_gpus else "core"
    cost = "" if price is None else f", {_price(plan.cost(price))} a step at {price:g} per {device} hour"
    yield f"{row('step', duration(plan.step_seconds))}  {total}{cost}"
    yield ""
    yield "Assumed: " + "; ".join((*plan.work.assumptions, *_assumptions(plan))) + "."


def _factor(plan: Plan, learned: float | None) -> str:
    """Return a learned factor in words; empty if there is none."""
    number = len(plan.factors.runs)
    return "" if learned is None else f"  (x {learned:.2f} by {number} run{'s' if number > 1 else ''})"


def _assumptions(plan: Plan) -> Sequence[str]:
    chip = plan.machines.accelerator
    rates = (
        f"products reach {chip.products_share:.0%} of {chip.flops / 1e12:,.3g} TFLOP/s and kernels that move data "
        f"{MEMORY:.0%} of {chip.memory_rate / 1e9:,.0f} GB/s"
    )
    elsewhere = "servers generate elsewhere, and their time and weight sync are not counted"
    servers = (elsewhere,) if plan.topology.num_servers else ()
    learned = (
        () if plan.factors.runs else ("no run on this device has corrected the times (rl plan --from RUN --learn)",)
    )
    return (rates, "environments, judges elsewhere and validation take no time", *servers, *learned)


def search_lines(found: Sequence[Change], now: Plan) -> Iterator[str]:
    """Yield the fastest layouts as lines of text, after the recipe's own."""
    yield ""
    yield f"Fastest layouts on the same devices (the recipe: {duration(now.step_seconds)}):"
    if not found:
        yield "  none that was tried fits"
    for change in found:
        fullest = change.plan.fullest
        taken = size(fullest.total) if fullest is not None else ""
        remark = f"  ({change.remark})" if change.remark else ""
        yield f"  {duration(change.plan.step_seconds):>8}  {taken:>8}  {change.overrides or 'as it is'}{remark}"


def as_json(
    plan: Plan, *, price: float | None, change: Change | None, found: Sequence[Change], took: Took | None = None
) -> dict[str, Any]:
    """Return a plan as plain data; bytes and seconds. See `lines` for the arguments."""
    fullest = plan.fullest

    def changed(each: Change) -> dict[str, Any]:
        return {"overrides": dict(each.values), "step_seconds": each.plan.step_seconds, "remark": each.remark}

    return {
        "schema": SCHEMA,
        "recipe": plan.recipe,
        "device": plan.machines.accelerator.name,
        "num_devices": plan.num_devices,
        "device_bytes": plan.capacity,
        "fits": plan.fits,
        "fullest": None if fullest is None else {"role": fullest.role, "phase": fullest.phase, "bytes": fullest.total},
        "memory": [
            {"role": usage.role, "phase": usage.phase, "device": dict(usage.device), "host": dict(usage.host)}
            for usage in plan.usages
        ],
        "host_bytes": plan.host_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "num_checkpoints": plan.num_checkpoints,
        "seconds": dict(plan.seconds),
        "step_seconds": plan.step_seconds if plan.seconds else None,
        "tokens": plan.work.num_tokens,
        "tokens_per_second": plan.tokens_per_second,
        "cost": None if price is None or not plan.seconds else plan.cost(price),
        "factors": dict(plan.factors.seconds),
        "memory_factors": dict(plan.factors.memory),
        "learned_from": list(plan.factors.runs),
        "assumptions": [*plan.work.assumptions, *_assumptions(plan)],
        "problems": list(plan.problems),
        "measured": None if took is None else _measured(took),
        "change": None if change is None else changed(change),
        "search": [changed(each) for each in found],
    }


def _measured(took: Took) -> dict[str, Any]:
    peaks = [{"role": role, "phase": phase, "bytes": size} for (role, phase), size in took.memory.items()]
    return {"seconds": dict(took.seconds), "memory": peaks}
