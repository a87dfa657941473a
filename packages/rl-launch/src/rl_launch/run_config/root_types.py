"""Assemble the strict type of a whole config from the sections of the installed packages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from rl_core.config import Config, Problem, ProblemError, RawConfig, assemble, nearest_as_remedy, refusal
from rl_core.environments.instance import environment_types
from rl_core.errors import ConfigError
from rl_core.model_config import ColocatedConfig, GenerationConfig, ModelConfig, OptimizerConfig
from rl_core.plugins import (
    ALGORITHMS,
    ENVIRONMENTS,
    GENERATORS,
    POLICIES,
    AlgorithmPlugin,
    algorithm_named,
    names,
    plugins,
)
from rl_core.user_code import is_in_file
from rl_launch.backends import models_in
from rl_launch.root_config import EVAL, POLICY, ClusterConfig, EnvironmentsConfig, RootConfig, TinkerConfig
from rl_launch.run_session.config import CheckpointingConfig, LoggerConfig, ProfilingConfig


def type_of(raw: RawConfig, *, of_run: bool = False) -> type[RootConfig]:
    """Return the root type for the `algorithm` of a config; see `root_type`."""
    return root_type(algorithm_of(raw), raw, of_run=of_run)


def root_type(algorithm: AlgorithmPlugin, raw: RawConfig, *, of_run: bool = False) -> type[RootConfig]:
    """Return the root type of a run: sections of the algorithm, of installed backends and environments, and of the
    runtime.

    Args:
        algorithm: Algorithm of the config.
        raw: Values that the user wrote.
        of_run: True to have only the environments and the models of the config, as a run does; False for all installed
            environments, all models that may be written, and tasks to score, to explain and complete their keys.

    Raises:
        ConfigError: If a section selects something that does not exist.
    """
    if not of_run:
        algorithm = algorithm.scoring or algorithm
    own = {key: _section(key, kind, raw) for key, kind in algorithm.sections.items()}
    sections: dict[str, Any] = {
        **own,
        **_nested(_model_types(algorithm, raw, own), own),
        "checkpointing": CheckpointingConfig,
        "logger": LoggerConfig,
        "profiling": ProfilingConfig,
        "cluster": ClusterConfig,
    }
    if not of_run:
        may_be = [key for key in algorithm.optional_models if key not in sections and "." not in key]
        sections |= dict.fromkeys(may_be, (model_type() | None, None))
    if not of_run or raw.is_written("tinker"):
        sections["tinker"] = (TinkerConfig | None, None)
    if algorithm.generates:
        sections["env"] = environments_type(raw, set(_named_environments(raw)) if of_run else None)
    return assemble("Root", sections, base=RootConfig)  # type: ignore[return-value]  # a subclass of its base


def environments_type(raw: RawConfig, named: Collection[str] | None = None) -> type[Config]:
    """Return the type of the section `env`: the environments that the user wrote there, and installed ones.

    Args:
        raw: Values that the user wrote.
        named: Names of the installed environments to include without being written; None for all of them.

    Raises:
        ConfigError: If an environment has a type that does not exist.
    """

    def environments(written: Any) -> type[Config]:
        types = environment_types(written, plugins(ENVIRONMENTS), named)
        return assemble("Environments", types, base=EnvironmentsConfig)

    return _section("env", environments, raw)


def _named_environments(raw: RawConfig) -> Iterator[str]:
    """Yield the names in a run's data and evaluation that may be environments. The rows of an installed dataset often
    name the environment with the dataset's own name."""
    trees: list[Any] = [_value_written(raw, "data"), _value_written(raw, "eval")]
    for tree in trees:
        if isinstance(tree, Mapping):
            yield from (str(tree[key]) for key in ("env_name", "dataset_name") if key in tree)
            trees += [value for value in tree.values() if not isinstance(value, str)]
        elif isinstance(tree, list):
            trees += tree
        elif isinstance(tree, str):  # a task, such as `reasoning_gym/TASK`
            yield tree.partition("/")[0]


def _section(key: str, kind: Any, raw: RawConfig) -> type[Config]:
    if isinstance(kind, type):
        return kind
    try:
        chosen: type[Config] = kind(raw.select(key))
    except ProblemError as error:
        keys = [".".join(filter(None, (key, problem.key))) for problem in error.problems]
        raise refusal([problem.at(at) for at, problem in zip(keys, error.problems, strict=True)], raw) from None
    return chosen


def algorithm_of(raw: RawConfig) -> AlgorithmPlugin:
    """Return the plugin for the algorithm of a config; if it scores tasks as it trains, the declaration of
    such runs.

    Raises:
        ConfigError: If the algorithm is not set or does not exist.
    """
    name, known = raw.select("algorithm"), names(ALGORITHMS)
    allowed = ", ".join(known)
    if name is None:
        raise refusal([Problem("algorithm", "must be set", allowed=allowed)], raw)
    if isinstance(name, str) and is_in_file(name):
        try:
            return _with_tasks(algorithm_named(name), raw)
        except ConfigError as error:
            raise refusal([Problem("algorithm", str(error))], raw) from None
    if not isinstance(name, str) or name not in known:
        remedy = nearest_as_remedy(str(name), known)
        reason = "is not an installed algorithm"
        raise refusal([Problem("algorithm", reason, got=name, allowed=allowed, remedy=remedy)], raw)
    return _with_tasks(algorithm_named(name), raw)


def _with_tasks(algorithm: AlgorithmPlugin, raw: RawConfig) -> AlgorithmPlugin:
    return algorithm if raw.select(EVAL) is None else algorithm.scoring or algorithm


def _model_types(
    algorithm: AlgorithmPlugin, raw: RawConfig, around: Mapping[str, type[Config]]
) -> dict[str, type[Config]]:
    """Return the types of the sections of models, by dotted key.

    Args:
        algorithm: Algorithm of the config.
        raw: Values that the user wrote.
        around: Types of the algorithm's own sections. One with models among its sections has their bases.
    """

    def names_in(key: str) -> tuple[str, ...]:
        if key in around:
            return models_in(around[key])
        written = raw.select(key)
        # a name with a dot is not a key and is refused by the type of the section
        return tuple(name for name in written if "." not in str(name)) if isinstance(written, Mapping) else ()

    def base_of(key: str) -> type[Config]:
        head, _, name = key.partition(".")
        return around[head].model_fields[name].annotation if head in around else ModelConfig  # type: ignore[return-value]

    types = {key: model_type(base_of(key)) for key in algorithm.model_keys(names_in)}
    types[POLICY] = policy_type(generates=algorithm.generates)
    for key, defaults in algorithm.training_defaults(partial(_value_written, raw)).items():
        adapts = _value_written(raw, f"{key}.lora_cfg.enabled") is True
        types[key] = _trained_by_default(types[key], defaults.rows, defaults.adapter_lr if adapts else defaults.lr)
    return types


def model_type(base: type[Config] = ModelConfig) -> type[Config]:
    """Return the type of the section of a model that is not the policy.

    Args:
        base: Type that it extends.
    """
    return assemble("Model", {**_backend_types(POLICIES), "colocated": ColocatedConfig}, base=base)


def _value_written(raw: RawConfig, key: str) -> Any:
    """Return the value that the user wrote at a key; None if there is none or it is wrong, which is reported later."""
    try:
        return raw.select(key)
    except ConfigError:
        return None


def _trained_by_default(model: type[Config], rows: int, lr: float) -> type[Config]:
    """Return the type of a model's section with other training defaults."""
    arguments = {**OptimizerConfig().kwargs, "lr": lr}
    optimizer = assemble("Optimizer", {}, base=OptimizerConfig, defaults={"kwargs": arguments})
    return assemble(model.__name__, {"optimizer": optimizer}, base=model, defaults={"train_global_batch_size": rows})


def policy_type(*, generates: bool) -> type[Config]:
    """Return the type of the policy's section, with the settings of all installed backends, and of all engines if the
    algorithm generates."""
    sections: dict[str, Any] = _backend_types(POLICIES)
    if generates:
        sections["generation"] = assemble("Generation", _backend_types(GENERATORS), base=GenerationConfig)
    return assemble("Policy", sections, base=ModelConfig)


def _backend_types(group: str) -> dict[str, type[Config]]:
    return {found.key: found.config for found in plugins(group).values()}


def _nested(types: Mapping[str, type[Config]], around: Mapping[str, type[Config]]) -> dict[str, type[Config]]:
    """Return types by dotted key as nested sections, including the sections of `around`."""
    nested = {key: kind for key, kind in types.items() if "." not in key}
    for head in dict.fromkeys(key.partition(".")[0] for key in types if "." in key):
        below = {key.partition(".")[2]: kind for key, kind in types.items() if key.startswith(f"{head}.")}
        nested[head] = assemble(head.title(), _nested(below, {}), base=around.get(head, Config))
    return nested
