"""Changes of a recipe: the smallest one that fits, and the layouts that train fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from rl_algos import PolicyGradientConfig, RolloutConfig
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.facts.hf_config import num_experts_of
from rl_launch.backends import ModelBackend
from rl_launch.planning.plan import GENERATING, SYNC, Plan, fields_of
from rl_launch.planning.workload import steps_section
from rl_launch.root_config import POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import changed_plan

SIZES = (1, 2, 4, 8, 16)
"""Parallel sizes that a search tries, next to those of the recipe."""
EXPERT_SIZES = (1, 8, 16, 64)
"""The same of experts."""
LONG_ROW = 8192
"""Fewest tokens of the longest row for which a search splits rows over ranks."""
IMPORTANCE = "loss_fn.importance.high"
"""Key of the bound of importance weights, which rollouts of earlier weights need."""
MAX_RANKS = 1024
"""Most devices that the smallest change that fits adds up to."""
NUM_OTHERS = 2
"""Maximum number of layouts that a search lists in addition, whose rollouts are of other weights."""
CHUNKS = (1024, 256)
"""Values of `logprob_chunk_size` that take less memory."""
SEQUENCE_PARALLEL = "sequence_parallel"
MICROBATCHES = ("train_mb_tokens", "logprob_mb_tokens", "train_micro_batch_size", "logprob_batch_size")

Planner = Callable[[RunPlan], Plan]
"""Function from a run's resolved config to its plan on the device of interest."""
Values = Mapping[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True)
class Change:
    """Other values of some keys, and the plan with them.

    Args:
        values: Values by dotted key.
        plan: The plan.
        remark: What the change costs, as a sentence without a full stop; empty if only time.
    """

    values: Values
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
    of them does. It has no value that it fits without.

    Args:
        run: The run that does not fit.
        planner: Plans a run.
    """
    devices = planner(run).num_devices
    for tried in _smaller(run, planner):
        fitting = _fitting_with_engine(run, planner, tried)
        if fitting is None:
            continue
        values = _without_needless(run, planner, fitting)
        if (changed := _checked(run, values)) is None:
            continue
        found = planner(changed)
        remarks = [f"{found.num_devices} GPUs"] if found.num_devices != devices else []
        if any(key.endswith("cpu_offload") for key in values):
            remarks.append("parameters come from host memory for each pass")
        return Change(values, found, "; ".join(remarks))
    return None


def _plan(run: RunPlan, planner: Planner, values: Values) -> Plan | None:
    """Return the plan with other values, without checks; None if they do not go together."""
    try:
        found = planner(with_values(run, values))
    except (ValueError, ZeroDivisionError):
        return None
    placed = ((found.topology.devices(name).count, claim) for name, claim in found.topology.claims.items())
    return None if any(count % claim.ranks for count, claim in placed if not claim.servers) else found


def _fitting_with_engine(run: RunPlan, planner: Planner, values: Values) -> Values | None:
    """Return the values if the run fits with them, or those with more ranks of an engine if its weights, next to those
    of the policy in a weight sync, are all that is too large; None if neither fits."""
    key, found = engine_tensor_key(run), _plan(run, planner, values)
    while found is not None and not found.fits:
        capacity = found.capacity or 0.0
        too_large = {usage.phase for usage in found.usages if usage.total > capacity}
        if key is None or too_large != {SYNC} or (size := 2 * values.get(key, _value(run, key))) > SIZES[-1]:
            return None
        values = {**values, key: size}
        found = _plan(run, planner, values)
    return None if found is None else values


def _fits(run: RunPlan, planner: Planner, values: Values) -> bool:
    found = _plan(run, planner, values)
    return found is not None and found.fits is True


def _without_needless(run: RunPlan, planner: Planner, values: Values) -> dict[str, Any]:
    """Return the values without those that fit without them, the costliest first, and with the largest microbatches."""
    found = dict(values)
    for key in (key for key in reversed(list(values)) if not key.endswith(SEQUENCE_PARALLEL)):
        fewer = {name: value for name, value in found.items() if name != key}
        if _fits(run, planner, fewer):
            found = fewer
    for key in (key for key in found if key.endswith(MICROBATCHES)):
        own = _value(run, key)
        while (own is None or 2 * found[key] < own) and _fits(run, planner, larger := {**found, key: 2 * found[key]}):
            found = larger
    return found


def _smaller(run: RunPlan, planner: Planner) -> Iterator[dict[str, Any]]:
    """Yield changes in order of their cost: microbatches, gradients, logits, layouts, host memory, more devices."""
    engine = _smallest_engine(run, planner, {})
    saved = dict(engine)
    if engine:
        yield dict(saved)
    models = [model for model in run.backends.models.values() if model.plugin.memory is not None]
    for smaller in _microbatches(models):
        saved |= smaller
        yield dict(saved)
    sharded, offloaded = (
        {key: value for model in models if (key := _backend_key(model, name))}
        for name, value in (("gradient_accumulation", "sharded"), ("cpu_offload", True))
    )
    if sharded:
        saved |= sharded
        yield dict(saved)
    for chunk in CHUNKS:
        saved |= {f"{model.section}.logprob_chunk_size": chunk for model in models}
        yield dict(saved)
    yield from ({**saved, **mesh} for mesh in _meshes(run, models))
    if offloaded:
        yield {**saved, **offloaded}
    cluster = run.config.cluster
    ranks, nodes = cluster.gpus_per_node, cluster.num_nodes
    while ranks * nodes < MAX_RANKS:
        if ranks < 8:
            ranks = min(8, ranks * 2)
        else:
            nodes *= 2
        more = {"cluster.gpus_per_node": ranks} | ({"cluster.num_nodes": nodes} if nodes > 1 else {})
        more |= _smallest_engine(run, planner, more)
        yield dict(more)
        yield {**saved, **more}
        yield from ({**saved, **mesh, **more} for mesh in _meshes(run, models))


def _microbatches(models: Sequence[ModelBackend]) -> Iterator[dict[str, Any]]:
    """Yield smaller and smaller microbatches of all models, down to one row."""
    sizes: dict[str, tuple[int, int]] = {}
    for model in models:
        config, longest = model.config, model.config.max_total_sequence_length
        if not (config.sequence_packing.enabled or config.dynamic_batching.enabled):
            sizes[f"{model.section}.train_micro_batch_size"] = config.train_micro_batch_size, 1
            sizes[f"{model.section}.logprob_batch_size"] = config.logprob_batch_size, 1
            continue
        name = "sequence_packing" if config.sequence_packing.enabled else "dynamic_batching"
        section = getattr(config, name)
        for kind, rows in (("train", config.train_micro_batch_size), ("logprob", config.logprob_batch_size)):
            key = f"{kind}_mb_tokens"
            sizes[f"{model.section}.{name}.{key}"] = getattr(section, key) or rows * longest, longest
    while smaller := {key: (size // 2, least) for key, (size, least) in sizes.items() if size // 2 >= least}:
        sizes |= smaller
        yield {key: size for key, (size, _) in smaller.items()}


def _smallest_engine(run: RunPlan, planner: Planner, values: Values) -> dict[str, Any]:
    """Return the smallest tensor-parallel size of the engine that its model and its cache fit with; empty if the run's
    own does, or none."""
    key = engine_tensor_key(run)
    if key is None:
        return {}
    own = _value(run, key)
    for size in (own, *(size for size in SIZES if size > own)):
        found = _plan(run, planner, {**values, key: size})
        if found is not None and found.serves:
            return {} if size == own else {key: size}
    return {}


def _meshes(run: RunPlan, models: Sequence[ModelBackend]) -> Iterator[dict[str, Any]]:
    """Yield layouts that split models over more ranks, those first that split them least."""
    experts = EXPERT_SIZES if _has_experts(run) else (1,)
    sizes = sorted(product(SIZES[:4], SIZES[:4], experts), key=lambda each: (prod(each), each[1]))
    seen: list[dict[str, Any]] = [{}]
    for tensor, pipeline, expert in sizes:
        values: dict[str, Any] = {}
        for model in models:
            axes = _axes(f"{model.section}.{model.plugin.key}", type(model.backend))
            for axis, size in (("tensor", tensor), ("pipeline", pipeline)):
                if axis in axes and size > _value(run, axes[axis]):
                    values |= _split(model, axis, axes[axis], size)
            if len(experts) > 1 and "expert" in axes and expert != _value(run, axes["expert"]):
                values[axes["expert"]] = expert
        if values not in seen:
            seen.append(values)
            yield values


def _split(model: ModelBackend, axis: str, key: str, size: int) -> dict[str, Any]:
    """Return the values for a parallel size. Tensor-parallel ranks share the tokens between blocks too."""
    shares = _backend_key(model, SEQUENCE_PARALLEL) if axis == "tensor" and size > 1 else ""
    return {key: size, **({shares: True} if shares else {})}


def _has_experts(run: RunPlan) -> bool:
    return bool(num_experts_of(fields_of(run.config.policy)[0]))


def _backend_key(model: ModelBackend, name: str) -> str:
    """Return the dotted key of a setting of a model's backend; empty if it has none of this name."""
    return f"{model.section}.{model.plugin.key}.{name}" if name in type(model.backend).model_fields else ""


def engine_tensor_key(run: RunPlan) -> str | None:
    """Return the dotted key of the engine's tensor-parallel size; None if it has none."""
    generation = run.backends.generation
    if generation is None:
        return None
    return _axes(f"{POLICY}.generation.{generation.plugin.key}", type(generation.backend)).get("tensor")


def _axes(section: str, config: type[Config]) -> dict[str, str]:
    """Return the dotted keys of the parallel sizes by the axis: `tensor`, `pipeline`, `expert`, `context`."""
    found: dict[str, str] = {}
    for name in config.model_fields:
        if name.endswith("parallel_size"):
            # The tensor-parallel size of experts comes after the size of the experts themselves.
            found.setdefault(name.partition("_")[0], f"{section}.{name}")
    return found


def _checked(run: RunPlan, values: Values) -> RunPlan | None:
    """Return the run with other values; None if they are refused."""
    try:
        return changed_plan(run, values, "rl plan")
    except ConfigError:
        return None


def with_values(run: RunPlan, values: Values) -> RunPlan:
    """Return a run with other values of some keys, without checks."""
    root: Any = run.root
    for key, value in values.items():
        root = _set(root, key.split("."), value)
    return run.with_config(root)


def _set(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if section is None:
        return None  # It is off. No plan depends on the sections that a change turns on; the checks read them.
    inner = _set(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def _value(run: RunPlan, key: str) -> Any:
    """Return a value of the config; None if a section of its key is off."""
    section: Any = run.root
    for name in key.split("."):
        section = None if section is None else getattr(section, name)
    return section


def fastest(run: RunPlan, planner: Planner, *, num: int) -> list[Change]:
    """Return the layouts that fit and train fastest by the plan, the fastest first, on the same number of devices.

    It tries the parallel sizes of policy and engine, microbatches, what is recomputed, parameters in host memory, and
    which devices the engine has. What is learned is the same, unless the engine gets devices of its own or gives them
    back: rollouts are then ahead of training, or no longer so. The fastest of those follow, with that as a remark.

    Args:
        run: The run.
        planner: Plans a run.
        num: Maximum number of layouts.
    """
    offloads = _backend_key(run.backends.models[POLICY], "cpu_offload")
    found = [Change({}, own)] if (own := planner(run)).fits else []
    for placed, remark in _placements(run):
        served = {**placed, **_fastest_engine(run, planner, placed)}
        fitting = list(_fitting(run, planner, served, remark))
        if not fitting and offloads:
            fitting = list(_fitting(run, planner, {**served, offloads: True}, remark))
        found += fitting
    found.sort(key=lambda change: change.plan.step_seconds)
    same, others = ([change for change in found if bool(change.remark) is differs] for differs in (False, True))
    return [*_accepted(run, same, num), *_accepted(run, others, NUM_OTHERS)]


def _accepted(run: RunPlan, found: Sequence[Change], num: int) -> list[Change]:
    """Return the first changes of different times that the checks of a run accept."""
    best: list[Change] = []
    for change in found:
        is_other = all(f"{change.plan.step_seconds:.3g}" != f"{each.plan.step_seconds:.3g}" for each in best)
        if is_other and _checked(run, change.values) is not None:
            best.append(change)
        if len(best) == num:
            break
    return best


def _fitting(run: RunPlan, planner: Planner, served: Values, remark: str) -> Iterator[Change]:
    """Yield the layouts that fit, with these values too. Values that the run has are left out."""
    for values in ({}, *_layouts(run)):
        changed = {key: value for key, value in {**served, **values}.items() if _value(run, key) != value}
        planned = _plan(run, planner, changed)
        if planned is not None and planned.fits:
            yield Change(changed, planned, remark)


def _fastest_engine(run: RunPlan, planner: Planner, placed: Values) -> dict[str, Any]:
    """Return the tensor-parallel size of the engine that generates fastest; empty if there is no engine."""
    key, found = engine_tensor_key(run), []
    if key is None:
        return {}
    for size in sorted({*SIZES[:4], _value(run, key)}):
        planned = _plan(run, planner, {**placed, key: size})
        if planned is not None and planned.serves and GENERATING in planned.seconds:
            found.append((planned.seconds[GENERATING], size))
    return {key: min(found)[1]} if found else {}


def _placements(run: RunPlan) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the devices that the engine may have, each with what changes besides time."""
    yield {}, ""
    section, generation, cluster = steps_section(run), run.backends.generation, run.config.cluster
    if not isinstance(section, RolloutConfig) or generation is None or generation.plugin.servers(generation.backend):
        return
    own, ahead = f"{POLICY}.generation.colocated", f"{section.section}.async_grpo.enabled"
    name = "num_nodes" if cluster.num_nodes > 1 else "gpus_per_node"
    total = getattr(cluster, name)
    is_apart, is_ahead = not run.config.policy.generation.colocated.enabled, section.max_staleness > 0
    for count in sorted({total * quarters // 4 for quarters in (1, 2, 3)} - {0, total}):
        values: dict[str, Any] = {f"{own}.resources.{name}": count}
        if is_apart:
            yield values, ""
        elif not is_ahead:
            values |= {f"{own}.enabled": False, ahead: True}
            if isinstance(section, PolicyGradientConfig) and _value(run, IMPORTANCE) is None:
                values[IMPORTANCE] = 2.0
            yield values, "rollouts of earlier weights"
    if is_apart and not is_ahead:
        yield {f"{own}.enabled": True}, ""
    elif is_apart and section.async_grpo.enabled and not section.over_samples:
        yield {f"{own}.enabled": True, ahead: False}, "rollouts of the newest weights only"


def _layouts(run: RunPlan) -> Iterator[dict[str, Any]]:
    """Yield layouts and microbatches of the policy."""
    model = run.backends.models[POLICY]
    policy = model.config
    axes = _axes(f"{POLICY}.{model.plugin.key}", type(model.backend))
    section = "sequence_packing" if policy.sequence_packing.enabled else "dynamic_batching"
    longest = policy.max_total_sequence_length
    tried = {
        "tensor": SIZES[:4],
        "pipeline": SIZES,
        "context": SIZES[:3] if longest >= LONG_ROW else (),
        "expert": EXPERT_SIZES if _has_experts(run) else (),
    }
    choices: dict[str, Sequence[Any]] = {
        axes[axis]: sorted({*sizes, _value(run, axes[axis])}) for axis, sizes in tried.items() if axis in axes
    }
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        given = getattr(policy, section).train_mb_tokens or policy.train_micro_batch_size * longest
        several = {given, *(tokens for tokens in (given // 4, given // 2, 2 * given, 4 * given) if tokens >= longest)}
        choices[f"{POLICY}.{section}.train_mb_tokens"] = sorted(several)
    else:
        rows = policy.train_micro_batch_size
        choices[f"{POLICY}.train_micro_batch_size"] = sorted({rows, max(1, rows // 2), 2 * rows})
    if key := _backend_key(model, "recompute"):
        # The plan that fits and recomputes least.
        choices[key] = ("auto",)
    dense, cluster = [axes[axis] for axis in ("tensor", "pipeline", "context") if axis in axes], run.config.cluster
    tensor = axes.get("tensor", "")
    for values in product(*choices.values()):
        layout = dict(zip(choices, values, strict=True))
        if prod(layout[key] for key in dense) <= cluster.num_nodes * cluster.gpus_per_node:
            # The recipe's own size keeps the recipe's own choice.
            is_own = not tensor or layout[tensor] == _value(run, tensor)
            yield layout if is_own else {**layout, **_split(model, "tensor", tensor, layout[tensor])}
