"""The plan of a run: what it takes of its devices in each phase, how long a step takes, and whether it fits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.facts.hf_config import language_fields
from rl_core.facts.model_size import WIDE_BYTES, ModelSize, size_of_name, trained_size
from rl_core.facts.optimizer_arguments import state_bytes
from rl_core.facts.rank_layout import EngineLayout, RankLayout
from rl_core.facts.vision_size import VisionSize
from rl_core.model import HEADLESS_ROLES
from rl_core.model_config import ModelConfig
from rl_core.weights import ITEM_BYTES
from rl_launch.backends import ModelBackend
from rl_launch.cluster.device import AUTO
from rl_launch.cluster.machine import local_gpus
from rl_launch.model_files.model_facts import hf_fields, whole_fields
from rl_launch.placement.topology import GENERATION, Topology
from rl_launch.planning.accelerators import (
    CPU_NAME,
    DISK_RATE,
    LAUNCH_SECONDS,
    Accelerator,
    accelerator_named,
    accelerator_of,
)
from rl_launch.planning.memory import (
    ASLEEP,
    COMMUNICATORS,
    CONTEXT,
    CONTEXTS,
    ENGINE_PROCESS,
    ENGINE_WEIGHTS,
    GAPS,
    GAPS_BETWEEN,
    NODE_PROCESSES,
    PENDING_PARTS,
    RANK_PROCESS,
    EngineRank,
    Recomputed,
    TrainingRank,
    Usage,
)
from rl_launch.planning.seconds import Machines, generation_seconds, optimizer_seconds, pass_seconds, sync_seconds
from rl_launch.planning.shapes import Shape, adapter_parameters, published_fields
from rl_launch.planning.workload import Lengths, Workload
from rl_launch.root_config import POLICY
from rl_launch.run_config.plan import RunPlan

DEFAULT = "h100"
"""Device of a plan for GPUs if none is named."""
TRAINING, LOGPROBS, GENERATING, SYNC, SAVE = "training", "logprobs", "generation", "weight_sync", "save"
JUDGING, TEACHER, VALUES = "judging", "teacher", "values"
ORDER = (GENERATING, JUDGING, VALUES, LOGPROBS, TEACHER, TRAINING, SYNC, SAVE)
"""Phases of a step; a run records the seconds of all except the last as `time/<name>`, and `time/<role>_training` of
other models than the policy."""
PASSES = (JUDGING, VALUES, LOGPROBS, TEACHER)
"""Phases that compute as training does, as the training of other models does."""


@dataclass(frozen=True)
class Factors:
    """What runs on a device took, over what was planned without them.

    Args:
        seconds: Factor by phase.
        memory: Factor of the tensors of a model's rank by phase.
        runs: Names of the runs that they come from.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    runs: tuple[str, ...] = ()

    def of(self, phase: str) -> float | None:
        """Return the factor of a phase; of other passes over rows that of training, if no run had them; None if there
        is none."""
        computes = phase in PASSES or phase.endswith(f"_{TRAINING}")
        return self.seconds.get(phase, self.seconds.get(TRAINING) if computes else None)


@dataclass(frozen=True)
class RolePlan:
    """A model of the run on its devices.

    Args:
        role: Its role.
        section: Dotted key of its config section.
        name: Folder or hub name.
        basis: Number of parameters and where it was read; empty if it is not known, and nothing is estimated.
        rank: Its fullest rank; None if its size is not known.
        recomputed: Layers that are recomputed; None if it does not train or its layers are not known.
        reads: Passes over the rows of a step that do not train, by the phase that they belong to.
        keeps_reference: True if it keeps its initial weights in host memory.
        has_turns: True if it waits in host memory while others use its devices.
        ranks: Its ranks.
        ranks_per_node: Its ranks on a node.
    """

    role: str
    section: str
    name: str
    basis: str
    rank: TrainingRank | None
    recomputed: Recomputed | None
    reads: Mapping[str, int]
    keeps_reference: bool
    has_turns: bool
    ranks: int
    ranks_per_node: int

    @property
    def trains(self) -> bool:
        """True if it has an optimizer."""
        return self.rank is not None and bool(self.rank.trained.count)


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Args:
        recipe: Name of the recipe.
        machines: Its devices.
        device: Kind of its devices.
        topology: Which devices its models and its generation share.
        roles: Its models.
        engine: Rank of a replica; None without generation.
        work: Rows of a step.
        usages: Memory by role and phase.
        seconds: Seconds of a step by phase, with the factors.
        host: Host memory of a node, by what takes it.
        checkpoint_bytes: Bytes of a checkpoint with its Hugging Face files.
        num_checkpoints: Checkpoints at a time; None if all are kept.
        factors: What earlier runs taught.
        problems: What is not estimated or too small, as sentences.
    """

    recipe: str
    machines: Machines
    device: Device
    topology: Topology
    roles: tuple[RolePlan, ...]
    engine: EngineRank | None
    work: Workload
    usages: tuple[Usage, ...]
    seconds: Mapping[str, float]
    host: Mapping[str, float]
    checkpoint_bytes: float
    num_checkpoints: int | None
    factors: Factors
    problems: tuple[str, ...]

    @property
    def host_bytes(self) -> float:
        """Host memory of a node."""
        return sum(self.host.values())

    @property
    def capacity(self) -> float | None:
        """Bytes of a device; None if it is not known."""
        return self.machines.accelerator.memory

    @property
    def num_devices(self) -> int:
        """Devices of the run."""
        own = sum(each.count for each in self.topology.own.values())
        return own + (self.topology.shared.count if self.topology.sharing else 0)

    @property
    def fullest(self) -> Usage | None:
        """The role and phase that take most of a device; None if nothing is estimated."""
        return max(self.usages, key=lambda usage: usage.total, default=None)

    @property
    def fits(self) -> bool | None:
        """True if every phase fits a device; None if that is not known."""
        if self.capacity is None or not self.usages or any(role.rank is None for role in self.roles):
            return None
        return self.serves and all(usage.total <= self.capacity for usage in self.usages)

    @property
    def serves(self) -> bool:
        """True if the engine, if there is one, has room for its weights and for the longest row."""
        if self.engine is None or self.capacity is None:
            return True
        taken = max(usage.total for usage in self.usages if usage.role == GENERATION)
        return taken <= self.capacity and not self.problems

    @property
    def step_seconds(self) -> float:
        """Seconds of a step. An asynchronous run generates while it trains, so that the slower of both counts."""
        generation = self.seconds.get(GENERATING, 0.0)
        rest = sum(self.seconds.values()) - generation
        if self.work.staleness and GENERATION in self.topology.own:
            return max(generation, rest)
        return generation + rest

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows of a step, over its seconds."""
        return self.work.num_tokens / self.step_seconds if self.step_seconds else 0.0

    def cost(self, price: float) -> float:
        """Return the cost of a step for a price of an hour of a device."""
        return price * self.num_devices * self.step_seconds / 3600


def device_of(plan: RunPlan, name: str | None, gpus: Iterable[str] = ()) -> tuple[Accelerator, Device]:
    """Return the device that a run is planned for: the one named, or what the config says.

    Args:
        plan: Plan of the run.
        name: Name in the table of devices; None for the config's own choice.
        gpus: GPUs of this machine, by the driver's names; the first whose rates are known is planned for if the config
            asks for GPUs.
    """
    chosen = plan.config.cluster.device
    if name is not None:
        accelerator = accelerator_named(name)
        return accelerator, CPU if accelerator.name == CPU_NAME else CUDA
    if chosen == AUTO:
        chosen = "cuda" if local_gpus() else "cpu"
    kind = device_named(chosen)
    if not kind.runs_on_gpus:
        return accelerator_named(CPU_NAME), kind
    here = next((found for gpu in gpus if (found := accelerator_of(gpu))), None)
    return here or accelerator_named(DEFAULT), kind


def plan_run(
    plan: RunPlan,
    name: str,
    *,
    accelerator: Accelerator,
    device: Device,
    lengths: Lengths | None = None,
    factors: Factors | None = None,
) -> Plan:
    """Plan a run on a kind of device.

    Args:
        plan: Its resolved config.
        name: Name of its recipe.
        accelerator: Device with its rates.
        device: Kind of the device.
        lengths: Mean lengths that the user states.
        factors: What earlier runs on this device taught.
    """
    cluster, factors = plan.config.cluster, factors or Factors()
    ranks_per_node = device.ranks_per_node(cluster)
    topology = plan.backends.topology(cluster.num_nodes, ranks_per_node, device)
    machines = Machines(accelerator, ranks_per_node, _launch_seconds(accelerator))
    work = Workload.of(plan, lengths or Lengths())
    work = replace(work, assumptions=(*work.assumptions, *_of_images(plan.config.policy)))
    engine = _engine(plan, topology, device)
    roles, usages = [], []
    for role, model in plan.backends.models.items():
        reads = _reads(model, work, generates=plan.backends.generation is not None)
        found = replace(_role(role, model, topology, device, accelerator), reads=reads)
        roles.append(found)
        usages += list(_usages_of_model(found, topology, accelerator, is_on_gpus=device.runs_on_gpus, engine=engine))
    if engine is not None:
        usages.append(_usage_of_engine(engine, topology, accelerator, device, work))
    usages = [usage.scaled(factors.memory.get(usage.phase, 1.0)) for usage in usages]
    planned = Plan(
        recipe=name,
        machines=machines,
        device=device,
        topology=topology,
        roles=tuple(roles),
        engine=engine,
        work=work,
        usages=tuple(usages),
        seconds={},
        host=_host(roles, usages, engine, topology, device, saves_later=plan.config.checkpointing.async_save),
        checkpoint_bytes=sum(checkpoint_bytes(role.rank) for role in roles if role.rank is not None and role.trains),
        num_checkpoints=num_checkpoints(plan),
        factors=factors,
        problems=tuple(_problems(roles, engine, usages, topology, work, device)),
    )
    seconds = _seconds(planned, plan)
    learned = {phase: value * (factors.of(phase) or 1.0) for phase, value in seconds.items()}
    return replace(planned, seconds=learned)


def num_checkpoints(plan: RunPlan) -> int | None:
    """Return the maximum number of checkpoints at a time; None if all are kept, 0 if none is saved."""
    saves = plan.config.checkpointing
    if not saves.enabled:
        return 0
    # One more is being written, and the newest one is kept in addition if the others are the best by a metric.
    return None if saves.keep_top_k is None else saves.keep_top_k + bool(saves.metric_name) + 1


def fields_of(model: Any) -> tuple[dict[str, Any], str]:
    """Return the fields of a model's config, and where they come from: its `config.json`, or the shapes that this
    package has for its name. Both are empty if it has none."""
    fields = hf_fields(model)
    if fields:
        return fields, "config.json"
    published = published_fields(model.model_name)
    if published:
        return {**language_fields(published), **model.hf_config_overrides}, "its published shape"
    return {}, ""


def vision_of(model: ModelConfig) -> VisionSize | None:
    """Return the vision tower and the projector of a model; None if it sees no images or they are not known."""
    if not model.vision.enabled:
        return None
    return VisionSize.of(whole_fields(model) or published_fields(model.model_name))


@lru_cache(maxsize=16)
def _shape(fields: str) -> Shape | None:
    # A search plans the same models thousands of times.
    return Shape.of(json.loads(fields))


def _launch_seconds(accelerator: Accelerator) -> float:
    # A core computes what it launches itself.
    return LAUNCH_SECONDS / 2 if accelerator.name == CPU_NAME else LAUNCH_SECONDS


def _role(role: str, model: ModelBackend, topology: Topology, device: Device, accelerator: Accelerator) -> RolePlan:
    config, own = model.config, topology.devices(role)
    found = RolePlan(
        role=role,
        section=model.section,
        name=config.model_name,
        basis="",
        rank=None,
        recomputed=None,
        reads={},
        keeps_reference=model.spec.keeps_reference and not config.lora_cfg.enabled,
        has_turns=topology.takes_turns(role),
        ranks=own.count,
        ranks_per_node=own.ranks,
    )
    fields, source = fields_of(config)
    shape = _shape(json.dumps(fields))
    size = shape.size if shape is not None else None
    if size is None and not config.hf_config_overrides:
        source, size = "its name", size_of_name(config.model_name)
    if size is None or model.plugin.memory is None:
        return found
    vision = vision_of(config)
    if vision is not None:
        size = replace(size, vision=vision.parameters())
    whole = size
    layout = RankLayout(data=own.count)
    if model.plugin.layout is not None:
        layout = model.plugin.layout(config, model.backend, own.count, device)
    if model.spec.role in HEADLESS_ROLES:
        size = replace(size, head=0)
    trained, repeated = ModelSize(0), 0.0
    if model.spec.trains:
        trained = trained_size(config, fields, size, () if vision is None else vision.training(config.vision))
        if config.lora_cfg.enabled:
            seeing = 0 if vision is None else vision.adapters(config.vision, config.lora_cfg)
            trained = ModelSize(
                adapter_parameters(fields, config.lora_cfg, layout.tensor) if fields else 0, vision=seeing
            )
            repeated = trained.layers - (adapter_parameters(fields, config.lora_cfg) if fields else 0)
            size = replace(size, layers=size.layers + trained.layers, vision=size.vision + seeing)
    memory = model.plugin.memory(config, model.backend, size, own.count, trained=trained)
    rank = TrainingRank(config, shape, size, trained, layout, memory, repeated, vision)
    recomputed = None
    if trained.count:
        room = None if accelerator.memory is None else _room(topology, role, accelerator.memory)
        _, recomputed = rank.training(accelerator.memory, room)
    return replace(found, basis=f"{_count(whole.count)} parameters by {source}", rank=rank, recomputed=recomputed)


def _reads(model: ModelBackend, work: Workload, *, generates: bool) -> dict[str, int]:
    """Return how often a model reads the rows of a step without training, by the phase that the pass belongs to."""
    spec, has_head = model.spec, model.spec.role not in HEADLESS_ROLES
    if model.section == POLICY:
        if work.teaches_itself:
            return {TEACHER: 1}
        number = int(work.reads_own) + int(spec.keeps_reference)
        return {LOGPROBS: number} if number else {}
    if spec.trains:
        return {} if has_head else {VALUES: 1}
    return {(TEACHER if has_head else JUDGING) if generates else LOGPROBS: 1}


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e8 else f"{parameters / 1e6:.3g}M"


def _contexts(topology: Topology, active: str) -> float:
    """Return what processes that do not compute now, and the active one, keep on a device beside tensors."""
    sharing = topology.sharing if active in topology.sharing else (active,)
    models = [name for name in sharing if name != GENERATION]
    held = float(CONTEXT * max(1, len(models)))
    if topology.devices(active).count > 1:
        held += COMMUNICATORS
    if GENERATION in sharing and active != GENERATION:
        held += ASLEEP
    return held


def _room(topology: Topology, role: str, capacity: float) -> float:
    return (capacity - _contexts(topology, role)) * (1 - GAPS)


def _usages_of_model(
    role: RolePlan, topology: Topology, accelerator: Accelerator, *, is_on_gpus: bool, engine: EngineRank | None
) -> Iterator[Usage]:
    rank = role.rank
    if rank is None:
        return
    capacity = accelerator.memory
    held, room = 0.0, None
    if is_on_gpus and capacity is not None:
        held, room = _contexts(topology, role.role), _room(topology, role.role, capacity)
    extra: dict[str, float] = {CONTEXTS: held} if held else {}
    gaps = {GAPS_BETWEEN: (capacity - held) * GAPS} if room is not None and capacity is not None else {}
    reference = {"reference": rank.memory.weights} if role.keeps_reference else {}
    waiting = {**reference, **({"offloaded parameters": rank.memory.host} if rank.memory.host else {})}
    if role.trains:
        parts, _ = rank.training(capacity if is_on_gpus else None, room)
        yield Usage(role.role, TRAINING, {**parts, **extra, **gaps}, waiting)
    if role.reads or (engine is not None and role.role == POLICY):
        yield Usage(role.role, LOGPROBS, {**rank.forward(), **extra, **gaps}, waiting)
    if role.role == POLICY and engine is not None:
        staging = PENDING_PARTS * topology.device.bucket_bytes + rank.largest_tensor()
        parts = {"weights": rank.state.get("weights", 0.0), "buffers of the transfer": staging}
        if GENERATION in topology.sharing:
            parts[ENGINE_WEIGHTS] = engine.weights
        yield Usage(role.role, SYNC, {**parts, **extra}, waiting)
    if role.trains:
        written = rank.largest_tensor()
        saved = {name: size for name, size in rank.state.items() if name != "gradients"}
        yield Usage(role.role, SAVE, {**saved, **extra}, {**waiting, "tensors being written": written})


def _usage_of_engine(
    engine: EngineRank, topology: Topology, accelerator: Accelerator, device: Device, work: Workload
) -> Usage:
    parts = engine.parts(accelerator, device, work.longest_row)
    if device.runs_on_gpus:
        parts = {**parts, CONTEXTS: _contexts(topology, GENERATION)}
    return Usage(GENERATION, GENERATING, parts, {})


def _engine(plan: RunPlan, topology: Topology, device: Device) -> EngineRank | None:
    generation = plan.backends.generation
    if generation is None or topology.num_servers:
        return None
    fields, _ = fields_of(generation.model)
    shape = _shape(json.dumps(fields))
    size = shape.size if shape is not None else size_of_name(generation.model.model_name)
    if size is None:
        return None
    vision = vision_of(generation.model)
    if vision is not None:
        size = replace(size, vision=vision.parameters())
    is_shared = topology.takes_turns(GENERATION)
    layout = EngineLayout(tensor=topology.replica_ranks)
    if generation.plugin.engine_layout is not None:
        layout = generation.plugin.engine_layout(generation.model, generation.backend, device, is_shared=is_shared)
    return EngineRank(layout, shape, size, is_shared)


def _of_images(model: ModelConfig) -> tuple[str, ...]:
    """Return what is assumed of images, as sentences."""
    if not model.vision.enabled:
        return ()
    vision = vision_of(model)
    if vision is None:
        return ("images are not counted, because the vision tower is not known here",)
    longest = model.max_total_sequence_length
    tokens = vision.tokens(model, longest)
    return (f"up to {tokens:,.0f} of the {longest:,} tokens of a row are of images (vision.max_pixels, max_images)",)


def _host(
    roles: list[RolePlan],
    usages: Iterable[Usage],
    engine: EngineRank | None,
    topology: Topology,
    device: Device,
    *,
    saves_later: bool,
) -> dict[str, float]:
    """Return the host memory of a node, by what takes it: models that wait, references and offloaded parameters, copies
    that are written later, and processes; on the CPU also what is on devices otherwise, all roles together."""
    models = copies = steps = 0.0
    nodes = topology.num_nodes if device.is_logical else 1
    engines = 0 if engine is None else topology.num_replicas * engine.layout.num_ranks * nodes / topology.num_nodes
    ranks = sum(role.ranks_per_node for role in roles) * nodes
    for role in roles:
        if role.rank is None:
            continue
        memory, here = role.rank.memory, role.ranks_per_node * nodes
        each = memory.host + (memory.weights if role.keeps_reference else 0.0)
        if device.runs_on_gpus:
            each += memory.kept if role.has_turns else 0.0
        else:
            each += memory.device
            taken = max((usage.total for usage in usages if usage.role == role.role), default=0.0)
            steps += max(0.0, taken - memory.device) * here
        models += each * here
        copies += role.rank.copied * here if saves_later and role.trains else 0.0
    generating = [usage.total for usage in usages if usage.role == GENERATION and not device.runs_on_gpus]
    found = {
        "models": models,
        "copies of a save": copies,
        "a step's activations": steps,
        "engines": sum(generating) * engines,
        "processes": NODE_PROCESSES + RANK_PROCESS * ranks + ENGINE_PROCESS * engines,
    }
    return {name: size for name, size in found.items() if size}


def checkpoint_bytes(rank: TrainingRank) -> float:
    """Return the bytes of a checkpoint: float32 weights and optimizer state of what trains, frozen weights unless only
    adapters train, and Hugging Face files."""
    trained, each = rank.trained, state_bytes(rank.model.optimizer.name, rank.model.optimizer.kwargs)
    matrices = trained.layers + trained.experts + trained.vision - rank.repeated
    others, count = trained.embedding + trained.head, rank.size.count - rank.repeated
    state = matrices * each.matrices + others * each.others
    frozen = 0.0 if rank.model.lora_cfg.enabled else count - matrices - others
    return WIDE_BYTES * (matrices + others) + state + (frozen + count) * ITEM_BYTES[rank.model.precision]


def _problems(
    roles: list[RolePlan],
    engine: EngineRank | None,
    usages: list[Usage],
    topology: Topology,
    work: Workload,
    device: Device,
) -> Iterator[str]:
    for role in roles:
        if role.rank is None:
            yield f"the number of parameters of {role.name} ({role.section}) is not known here"
        elif role.rank.shape is None:
            yield (
                f"the layers of {role.name} ({role.section}) are not known here: activations and time are not estimated"
            )
    if engine is None or not device.runs_on_gpus:
        return
    cache = next((usage.device.get("KV cache", 0.0) for usage in usages if usage.role == GENERATION), 0.0)
    if cache <= 0:
        yield (
            f"the engine's weights take {engine.weights / 1e9:.1f} GB of each GPU, which leaves no memory for keys and "
            "values: raise the engine's tensor_parallel_size"
        )
    elif engine.cache_of_token and cache < work.longest_row * engine.cache_of_token:
        yield (
            f"the KV cache holds {cache / engine.cache_of_token:,.0f} tokens, less than a row of {work.longest_row:,}: "
            "raise the engine's tensor_parallel_size, or lower max_total_sequence_length"
        )


def _seconds(planned: Plan, plan: RunPlan) -> dict[str, float]:
    machines, engine, topology = planned.machines, planned.engine, planned.topology
    # An evaluation has no steps.
    if not planned.roles or any(role.rank is None or role.rank.shape is None for role in planned.roles):
        return {}
    work, found = planned.work.trained, dict.fromkeys(ORDER, 0.0)
    if engine is not None:
        cache = next(usage.device.get("KV cache", 0.0) for usage in planned.usages if usage.role == GENERATION)
        found[GENERATING] = generation_seconds(engine, cache, planned.work, topology.num_replicas, machines)
    for role in planned.roles:
        rank, training = role.rank, TRAINING if role.role == POLICY else f"{role.role}_{TRAINING}"
        assert rank is not None, "the size of every model is known"
        forward = pass_seconds(rank, work, machines, recomputed=None, training=False) if role.reads else 0.0
        for phase, number in role.reads.items():
            found[phase] += number * forward
        if role.trains:
            updates = work.updates
            if role.role != POLICY:
                updates = max(1, math.ceil(work.num_rows / rank.model.train_global_batch_size)) * work.passes
            own = replace(work, updates=updates)
            step = pass_seconds(rank, own, machines, recomputed=role.recomputed, training=True) * own.passes
            found[training] = step + optimizer_seconds(rank, own, machines)
        if role.has_turns and planned.device.runs_on_gpus:
            found[next(iter(role.reads), training)] += 2 * rank.memory.kept / machines.accelerator.host_rate
        if role.role == POLICY and engine is not None:
            is_shared = GENERATION in topology.sharing
            found[SYNC] = sync_seconds(rank, engine, machines, is_shared=is_shared)
    saves = plan.config.checkpointing
    if saves.enabled and saves.save_period:
        each = planned.checkpoint_bytes / (DISK_RATE * topology.num_nodes)
        if saves.async_save:
            each = sum(role.rank.memory.kept for role in planned.roles if role.rank and role.trains)
            each /= machines.accelerator.host_rate
        found[SAVE] = each / saves.save_period
    of_others = sorted(found.keys() - {*ORDER})
    first = ORDER.index(TRAINING)
    return {name: found[name] for name in (*ORDER[:first], *of_others, *ORDER[first:]) if found[name]}
