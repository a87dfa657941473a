"""The strict type of a whole config, assembled from the sections of the installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rl_core.config import (
    Config,
    ProblemError,
    RawConfig,
    assemble,
    did_you_mean,
    refusal,
)
from rl_core.environments.instance import environment_types
from rl_core.errors import ConfigError
from rl_core.model_config import (
    ColocatedConfig,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
)
from rl_core.plugins import (
    ALGORITHMS,
    ENVIRONMENTS,
    GENERATORS,
    POLICIES,
    AlgorithmPlugin,
    algorithm_named,
    names,
)
from rl_core.plugins.user_code import is_in_file
from rl_launch.backends import (
    installed,
)
from rl_launch.root_config import POLICY, ClusterConfig, EnvironmentsConfig, RootConfig
from rl_launch.session.config import CheckpointingConfig, LoggerConfig


def type_of(raw: RawConfig) -> type[RootConfig]:
    """The root type for the `algorithm` of a config."""
    return root_type(algorithm_of(raw), raw)


def root_type(algorithm: AlgorithmPlugin, raw: RawConfig) -> type[RootConfig]:
    """The root of a run: the algorithm's sections, those of installed backends and environments, and the runtime's.

    Raises:
        ConfigError: if a section chooses something that does not exist.
    """
    own = {key: _section(key, kind, raw) for key, kind in algorithm.sections.items()}
    sections: dict[str, Any] = {
        **own,
        **_nested(_model_types(algorithm, raw), own),
        "checkpointing": CheckpointingConfig,
        "logger": LoggerConfig,
        "cluster": ClusterConfig,
    }
    if algorithm.generates:
        sections["env"] = environments_type(raw)
    return assemble("Root", sections, base=RootConfig)  # type: ignore[return-value]  # a subclass of its base


def environments_type(raw: RawConfig) -> type[Config]:
    """The section `env`: the installed environments, and those that the user wrote.

    Raises:
        ConfigError: if one has a type that does not exist.
    """
    return _section("env", _environments_type, raw)


def _section(key: str, kind: Any, raw: RawConfig) -> type[Config]:
    if isinstance(kind, type):
        return kind
    try:
        chosen: type[Config] = kind(raw.select(key))
    except ProblemError as error:
        raise refusal([problem.at(f"{key}.{problem.key}") for problem in error.problems], raw) from None
    return chosen


def _environments_type(written: Any) -> type[Config]:
    return assemble("Environments", environment_types(written, installed(ENVIRONMENTS)), base=EnvironmentsConfig)


def algorithm_of(raw: RawConfig) -> AlgorithmPlugin:
    """Return the plugin that a config names as its algorithm.

    Raises:
        ConfigError: if it names none, or one that does not exist.
    """
    name = raw.select("algorithm")
    if name is None:
        known = ", ".join(names(ALGORITHMS))
        raise ConfigError(f"algorithm ({raw.name}): must be set; installed algorithms: {known}")
    if isinstance(name, str) and is_in_file(name):
        try:
            return algorithm_named(name)
        except ConfigError as error:
            raise ConfigError(f"algorithm ({raw.origin('algorithm')}): {error}") from None
    if not isinstance(name, str) or name not in names(ALGORITHMS):
        known, near = ", ".join(names(ALGORITHMS)), did_you_mean(str(name), names(ALGORITHMS))
        place = raw.origin("algorithm")
        raise ConfigError(f"algorithm ({place}): got {name!r}{near}; installed algorithms: {known}")
    return algorithm_named(name)


def _model_types(algorithm: AlgorithmPlugin, raw: RawConfig) -> dict[str, type[Config]]:
    """Types of the sections that hold models, by dotted key."""

    def names_in(key: str) -> tuple[str, ...]:
        written = raw.select(key)
        # a name with a dot is not a key; the type of the section refuses it
        return tuple(name for name in written if "." not in str(name)) if isinstance(written, Mapping) else ()

    others = assemble("Model", {**_backend_types(POLICIES), "colocated": ColocatedConfig}, base=ModelConfig)
    types = dict.fromkeys(algorithm.model_keys(names_in), others)
    types[POLICY] = policy_type(generates=algorithm.generates)
    for key, defaults in algorithm.training_defaults(partial(_value_written, raw)).items():
        adapts = _value_written(raw, f"{key}.lora_cfg.enabled") is True
        types[key] = _trained_by_default(types[key], defaults.rows, defaults.adapter_lr if adapts else defaults.lr)
    return types


def _value_written(raw: RawConfig, key: str) -> Any:
    """The value that the user wrote at a key; None if there is none, or if it is wrong, which is reported later."""
    try:
        return raw.select(key)
    except ConfigError:
        return None


def _trained_by_default(model: type[Config], rows: int, lr: float) -> type[Config]:
    """The type of a section of a model, with other defaults of what it trains with."""
    arguments = {**OptimizerConfig().kwargs, "lr": lr}
    optimizer = assemble("Optimizer", {}, base=OptimizerConfig, defaults={"kwargs": arguments})
    return assemble(model.__name__, {"optimizer": optimizer}, base=model, defaults={"train_global_batch_size": rows})


def policy_type(*, generates: bool) -> type[Config]:
    """Return the type of the section of the policy: with the settings of every installed backend, and of every engine
    if it generates."""
    sections: dict[str, Any] = _backend_types(POLICIES)
    if generates:
        sections["generation"] = assemble("Generation", _backend_types(GENERATORS), base=GenerationConfig)
    return assemble("Policy", sections, base=ModelConfig)


def _backend_types(group: str) -> dict[str, type[Config]]:
    return {found.key: found.config for found in installed(group).values()}


def _nested(types: Mapping[str, type[Config]], around: Mapping[str, type[Config]]) -> dict[str, type[Config]]:
    """Types by dotted key as sections within sections, those of `around` among them."""
    nested = {key: kind for key, kind in types.items() if "." not in key}
    for head in dict.fromkeys(key.partition(".")[0] for key in types if "." in key):
        below = {key.partition(".")[2]: kind for key, kind in types.items() if key.startswith(f"{head}.")}
        nested[head] = assemble(head.title(), _nested(below, {}), base=around.get(head, Config))
    return nested
