"""The backends that a run has chosen, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from rl_algos.requirement import LOSSES
from rl_core.config import Config, Problem, ProblemError, nearest_as_remedy
from rl_core.devices import Device
from rl_core.model import ModelSpec
from rl_core.model_config import ColocatedConfig, GenerationConfig, ModelConfig
from rl_core.plugins import (
    GENERATORS,
    POLICIES,
    AlgorithmPlugin,
    BackendPlugin,
    ModelNeed,
    Preload,
    Requirement,
    names,
    plugin,
    plugins,
)
from rl_launch.placement.topology import GENERATION, Claim, Topology, plan
from rl_launch.root_config import POLICY, RunConfig, section_of

DEFAULT = "dtensor"
"""Training backend of a model whose section enables none."""

ROLLOUT_WORKER = "rl_algos.rollouts.worker.worker:RolloutWorker"
"""Class of the worker that holds a generation engine."""

C = TypeVar("C", bound=Config)

_IMPORTED_BY_RAY = ("google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "requests")
"""Packages that Ray requires, two thirds of the time of its import. Each worker imports Ray itself, which reads the
variables of its process then."""


@dataclass(frozen=True)
class Backend(Generic[C]):
    """A backend and its settings, of types that pickle into a worker's environment.

    Args:
        plugin: Plugin of the backend.
        config: Settings that mean the same for every backend.
        backend: The backend's own settings.
        section: Dotted key of the section of its model.
    """

    plugin: BackendPlugin
    config: C
    backend: Config
    section: str

    def sizes(self, section: str) -> dict[str, int]:
        """Return the parallel sizes above 1, by dotted key from the root.

        Args:
            section: Dotted key of the section that holds the backend's settings.
        """
        names = [name for name in type(self.backend).model_fields if name.endswith("parallel_size")]
        written = {f"{section}.{self.plugin.key}.{name}": getattr(self.backend, name) for name in names}
        return {key: size for key, size in written.items() if isinstance(size, int) and size > 1}


@dataclass(frozen=True)
class ModelBackend(Backend[ModelConfig]):
    """The training backend of one model.

    Args:
        spec: The model's head, and whether it trains.
        colocated: True if it shares the policy's devices, or has its own.
    """

    spec: ModelSpec
    colocated: ColocatedConfig

    @property
    def replays_routing(self) -> bool:
        """True if its passes send tokens to the experts that the generator chose."""
        key = self.plugin.replay_key
        return bool(key and getattr(self.backend, key))


@dataclass(frozen=True)
class GenerationBackend(Backend[GenerationConfig]):
    """The generation engine.

    Args:
        model: The model that it serves.
        reports_routing: True if completions carry the experts that tokens were sent to.
    """

    model: ModelConfig
    reports_routing: bool = False


@dataclass(frozen=True)
class Backends:
    """The backends of a run.

    Args:
        models: Models, by role.
        generation: None if nothing is generated.
        requirements: Requirements of the code that the algorithm sends to workers.
    """

    models: Mapping[str, ModelBackend]
    generation: GenerationBackend | None = None
    requirements: tuple[Requirement, ...] = ()

    def topology(self, num_nodes: int, ranks_per_node: int, device: Device) -> Topology:
        """Return the devices of the run as these backends share them."""
        chosen = GenerationConfig() if self.generation is None else self.generation.config
        least = chosen.min_replicas
        if self.generation is not None and self.generation.plugin.servers(self.generation.backend):
            least = least or 1  # A server that is lost may come back by itself.
        return plan(
            self.claims,
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            device=device,
            weight_sync=chosen.weight_sync,
            weight_sync_encoding=chosen.weight_sync_encoding,
            # Without a policy the weights never change, and no replica joins.
            min_replicas=least if POLICY in self.models else None,
            max_replicas=chosen.max_replicas if POLICY in self.models else None,
        )

    @property
    def by_role(self) -> dict[str, Backend[Any]]:
        """The backends of the models and of generation."""
        chosen: dict[str, Backend[Any]] = {**self.models}
        return chosen if self.generation is None else {**chosen, GENERATION: self.generation}

    def preloads(self, device: Device) -> dict[str, Preload]:
        """Return the modules that the workers of each role import in any case."""
        found = {role: each.plugin.preload_of(each.backend, device) for role, each in self.by_role.items()}
        if GENERATION in found:
            modules = (*found[GENERATION].modules, ROLLOUT_WORKER.partition(":")[0])
            found[GENERATION] = replace(found[GENERATION], modules=modules)
        return {role: replace(each, modules=(*each.modules, *_IMPORTED_BY_RAY)) for role, each in found.items()}

    @property
    def claims(self) -> list[Claim]:
        """The claims of everything that computes on devices."""
        claims = [
            Claim(role, model.section, model.plugin.ranks(model.backend), model.colocated, model.sizes(model.section))
            for role, model in self.models.items()
        ]
        if self.generation is not None:
            ranks = self.generation.plugin.ranks(self.generation.backend)
            key, colocated = f"{POLICY}.generation", self.generation.config.colocated
            spans_nodes = bool(self.generation.plugin.follower)
            servers = self.generation.plugin.servers(self.generation.backend)
            claims.append(Claim(GENERATION, key, ranks, colocated, self.generation.sizes(key), spans_nodes, servers))
        return claims


SINGLE_MODEL = AlgorithmPlugin(
    name="",
    sections={},
    implementation="",
    generates=False,
    trains=False,
    models=lambda config: {POLICY: ModelNeed(POLICY, ModelSpec(trains=False))},
    # It has the environment of runs that train it, so that no further one is built.
    requirements=(LOSSES,),
)
"""Algorithm of a config without one, for a single model without a run."""


def model_keys(algorithm: AlgorithmPlugin, config: object) -> tuple[str, ...]:
    """Return the dotted keys of the sections of a resolved config that hold models."""
    fields = type(cast(Config, config)).model_fields

    def names_in(key: str) -> tuple[str, ...]:
        return models_in(type(section_of(config, key))) if key in fields else ()

    return algorithm.model_keys(names_in)


def models_in(section: type[Config]) -> tuple[str, ...]:
    """Return the keys of a section that hold models; all keys of a section that is a model itself."""
    if issubclass(section, ModelConfig):
        return tuple(section.model_fields)
    kinds = {key: field.annotation for key, field in section.model_fields.items()}
    return tuple(key for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, ModelConfig))


def backends_of(algorithm: AlgorithmPlugin, config: RunConfig) -> Backends:
    """Return the backends that a resolved config chooses, with their settings.

    Raises:
        ProblemError: If two training backends of a model are enabled, or none.
    """
    needs = algorithm.models(config)
    strange = {need.section for need in needs.values()} - set(model_keys(algorithm, config))
    assert not strange, f"the plugin of {algorithm.name} names {strange} in models() and not in model_sections"
    models = {}
    for role, need in needs.items():
        section = section_of(config, need.section)
        found = _enabled(need.section, section)
        colocated = ColocatedConfig() if need.section == POLICY else section.colocated
        own, shared = getattr(section, found.key), _shared(section, ModelConfig)
        models[role] = ModelBackend(found, shared, own, need.section, need.spec, colocated)
    generation = None
    if algorithm.generates:
        replays = any(model.replays_routing for model in models.values())
        generation = _generation_backend(config, reports_routing=replays)
    return Backends(models, generation, (*algorithm.requirements, *algorithm.further(config)))


def _generation_backend(config: RunConfig, *, reports_routing: bool) -> GenerationBackend:
    generation = config.policy.generation
    if generation.backend not in (known := names(GENERATORS)):
        key, reason, got = f"{POLICY}.generation.backend", "is not an installed engine", generation.backend
        allowed, remedy = ", ".join(known), nearest_as_remedy(got, known)
        raise ProblemError(Problem(key, reason, got=got, allowed=allowed, remedy=remedy))
    found: BackendPlugin = plugin(GENERATORS, generation.backend)
    shared, model = _shared(generation, GenerationConfig), _shared(config.policy, ModelConfig)
    return GenerationBackend(found, shared, getattr(generation, found.key), POLICY, model, reports_routing)


def _enabled(key: str, section: Any) -> BackendPlugin:
    """Return the training backend that a model's section enables."""
    found: Mapping[str, BackendPlugin] = plugins(POLICIES)
    states = {name: getattr(section, each.key).enabled for name, each in found.items()}
    enabled = [name for name, state in states.items() if state]
    if len(enabled) > 1:
        keys = " and ".join(f"{key}.{found[name].key}.enabled" for name in enabled)
        reason = f"{keys} are {'both' if len(enabled) == 2 else 'all'} true, but a model has one backend"
        raise ProblemError(Problem(key, reason, remedy="Enable only one of them"))
    if enabled:
        return found[enabled[0]]
    if states.get(DEFAULT, False) is None:
        return found[DEFAULT]
    choices = ", ".join(f"{key}.{each.key}.enabled=true" for each in found.values())
    raise ProblemError(Problem(key, "no training backend is enabled", remedy=f"Set one of {choices}"))


def _shared(section: Config, kind: type[C]) -> C:
    """Return the settings of a section that are the same for every backend. A worker's environment can unpickle them,
    because their type has no settings of other backends. They are not validated again: commands change some of them to
    values that no user could write together."""
    values = {}
    for name, field in kind.model_fields.items():
        value: Any = getattr(section, name)
        own: Any = field.annotation
        is_assembled = isinstance(own, type) and issubclass(own, Config) and type(value) is not own
        values[name] = _shared(value, own) if is_assembled else value
    return kind.model_construct(section.model_fields_set & set(kind.model_fields), **values)
