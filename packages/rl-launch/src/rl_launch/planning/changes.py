"""Changes of a recipe: the smallest one that fits, and the layouts that train fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.facts.hf_config import num_experts_of
from rl_launch.planning.plan import Plan, fields_of
from rl_launch.root_config import POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import changed_plan

SIZES = (1, 2, 4, 8, 16)
"""Parallel sizes that a search tries."""
MAX_RANKS = 1024
"""Most devices that the smallest change that fits adds up to."""
TRIED = 40
"""Number of the fastest layouts whose config is checked."""
CHUNKS = (1024, 256)
"""Values of `logprob_chunk_size` that take less memory."""

Planner = Callable[[RunPlan], Plan]
"""Function from a run's resolved config to its plan on the device of interest."""


@dataclass(frozen=True)
class Change:
    """Other values of some keys, and the plan with them.

    Args:
        values: Values by dotted key.
        plan: The plan.
        remark: What the change costs, as a sentence without a full stop; empty if only time.
    """

    values: Mapping[str, Any]
    plan: Plan
    remark: str = ""

    @property
    def overrides(self) -> str:
        """The keys and values as they are written on a command line."""
        return " ".join(f"{key}={_written(value)}" for key, value in self.values.items())


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def smallest_change(run: RunPlan, planner: Planner) -> Change | None:
    """Return the first change that fits, of those that cost least to those that change what is learned; None if none
    of them does.

    Args:
        run: The run that does not fit.
        planner: Plans a run.
    """
    for values, remark in _smaller(run):
        changed = _checked(run, values)
        if changed is None:
            continue
        found = planner(changed)
        if found.fits:
            return Change(values, found, remark)
    return None


def _smaller(run: RunPlan) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield changes in order of their cost, each with what it costs besides time."""
    model = run.backends.models[POLICY]
    policy, key = model.config, f"{POLICY}.{model.plugin.key}"
    saved: dict[str, Any] = {}
    longest = policy.max_total_sequence_length
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        section = "sequence_packing" if policy.sequence_packing.enabled else "dynamic_batching"
        tokens = getattr(policy, section).train_mb_tokens or policy.train_micro_batch_size * longest
        while tokens // 2 >= longest:
            tokens //= 2
            saved |= {f"{POLICY}.{section}.train_mb_tokens": tokens, f"{POLICY}.{section}.logprob_mb_tokens": tokens}
            yield dict(saved), ""
    else:
        rows = policy.train_micro_batch_size
        while rows > 1:
            rows //= 2
            saved |= {f"{POLICY}.train_micro_batch_size": rows, f"{POLICY}.logprob_batch_size": rows}
            yield dict(saved), ""
    fields = type(model.backend).model_fields
    if "gradient_accumulation" in fields:
        saved[f"{key}.gradient_accumulation"] = "sharded"
        yield dict(saved), ""
    for chunk in CHUNKS:
        yield {**saved, f"{POLICY}.logprob_chunk_size": chunk}, ""
    saved[f"{POLICY}.logprob_chunk_size"] = CHUNKS[-1]
    yield from ((each, "") for each in _meshes(run, saved))
    if "cpu_offload" in fields:
        yield {**saved, f"{key}.cpu_offload": True}, "parameters come from host memory for each pass"
    cluster = run.config.cluster
    ranks, nodes = cluster.gpus_per_node, cluster.num_nodes
    while ranks * nodes < MAX_RANKS:
        if ranks < 8:
            ranks = min(8, ranks * 2)
        else:
            nodes *= 2
        more = {"cluster.gpus_per_node": ranks} | ({"cluster.num_nodes": nodes} if nodes > 1 else {})
        remark = f"{ranks * nodes} GPUs"
        yield dict(more), remark
        yield {**saved, **more}, remark
        yield from (({**each, **more}, remark) for each in _meshes(run, saved))


def _meshes(run: RunPlan, saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield layouts that split the model over more ranks of the same devices, and the engine too."""
    sizes = parallel_keys(run)
    tensor = sizes.get("tensor")
    engine = engine_tensor_key(run)
    for size in SIZES[1:4]:
        split = {tensor: size} if tensor else {}
        if engine:
            yield {**saved, engine: size}
            yield {**saved, **split, engine: size}
        elif split:
            yield {**saved, **split}
        if "pipeline" in sizes:
            yield {**saved, **split, sizes["pipeline"]: size, **({engine: size} if engine else {})}


def parallel_keys(run: RunPlan) -> dict[str, str]:
    """Return the dotted keys of the policy's parallel sizes by the axis: `tensor`, `pipeline`, `expert`."""
    model = run.backends.models[POLICY]
    return _axes(f"{POLICY}.{model.plugin.key}", type(model.backend))


def engine_tensor_key(run: RunPlan) -> str | None:
    """Return the dotted key of the engine's tensor-parallel size; None if it has none."""
    generation = run.backends.generation
    if generation is None:
        return None
    return _axes(f"{POLICY}.generation.{generation.plugin.key}", type(generation.backend)).get("tensor")


def _axes(section: str, config: type[Config]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in config.model_fields:
        if name.endswith("parallel_size"):
            # The tensor-parallel size of experts comes after the size of the experts themselves.
            found.setdefault(name.partition("_")[0], f"{section}.{name}")
    return found


def _checked(run: RunPlan, values: Mapping[str, Any]) -> RunPlan | None:
    """Return the run with other values; None if they are refused."""
    try:
        return changed_plan(run, values, "rl plan")
    except ConfigError:
        return None


def with_values(run: RunPlan, values: Mapping[str, Any]) -> RunPlan:
    """Return a run with other values of some keys, without checks."""
    root: Any = run.root
    for key, value in values.items():
        root = _set(root, key.split("."), value)
    return run.with_config(root)


def _set(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    inner = _set(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def fastest(run: RunPlan, planner: Planner, *, num: int) -> list[Change]:
    """Return the layouts that fit and train fastest by the plan, the fastest first, on the same number of devices.

    It tries the parallel sizes of policy and engine, microbatches, what is recomputed, and devices of the engine's
    own. What is learned is the same, except that an engine with its own devices needs asynchronous rollouts to
    be faster, so those are tried only for runs that have them.

    Args:
        run: The run.
        planner: Plans a run.
        num: Maximum number of layouts.
    """
    found: list[Change] = []
    for values in _layouts(run):
        try:
            planned = planner(with_values(run, values))
        except (ConfigError, ValueError, ZeroDivisionError):
            continue
        if planned.fits:
            found.append(Change(values, planned))
    found.sort(key=lambda change: change.plan.step_seconds)
    best: list[Change] = []
    seen = set()
    for change in found[:TRIED]:
        shown = round(change.plan.step_seconds, 1)
        if shown in seen or _checked(run, change.values) is None:
            continue
        seen.add(shown)
        best.append(change)
        if len(best) == num:
            break
    return best


def _layouts(run: RunPlan) -> Iterator[dict[str, Any]]:
    model = run.backends.models[POLICY]
    key, policy = f"{POLICY}.{model.plugin.key}", model.config
    axes, engine = parallel_keys(run), engine_tensor_key(run)
    has_experts = bool(num_experts_of(fields_of(policy)[0]))
    section = "sequence_packing" if policy.sequence_packing.enabled else "dynamic_batching"
    is_packed = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
    given = getattr(policy, section).train_mb_tokens or policy.train_micro_batch_size * policy.max_total_sequence_length
    choices: dict[str, Sequence[Any]] = {}
    if "tensor" in axes:
        choices[axes["tensor"]] = SIZES[:4]
    if "pipeline" in axes:
        choices[axes["pipeline"]] = SIZES
    if "expert" in axes and has_experts:
        choices[axes["expert"]] = SIZES[:4]
    if engine:
        choices[engine] = SIZES[:4]
    if is_packed:
        longest = policy.max_total_sequence_length
        choices[f"{POLICY}.{section}.train_mb_tokens"] = [
            tokens for tokens in (given // 4, given // 2, given, 2 * given, 4 * given) if tokens >= longest
        ] or [given]
    if "recompute" in type(model.backend).model_fields:
        choices[f"{key}.recompute"] = ("auto", "full")
    own = f"{POLICY}.generation.colocated"
    is_apart = run.backends.generation is not None and not run.config.policy.generation.colocated.enabled
    if is_apart:
        name, total = "gpus_per_node", run.config.cluster.gpus_per_node
        if run.config.cluster.num_nodes > 1:
            name, total = "num_nodes", run.config.cluster.num_nodes
        choices[f"{own}.resources.{name}"] = sorted({max(1, total * quarters // 4) for quarters in (1, 2, 3)})
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
