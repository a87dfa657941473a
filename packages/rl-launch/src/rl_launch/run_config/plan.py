"""The plan of a run, made once from its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from rl_core.algorithm import Algorithm, implementation_of
from rl_core.config import Config, RawConfig, Resolved
from rl_core.devices import Device
from rl_core.plugins import GENERATORS, POLICIES, AlgorithmPlugin, algorithm_named, plugins
from rl_launch.backends import SINGLE_MODEL, Backends, backends_of, model_keys
from rl_launch.cluster.device import resolve_device
from rl_launch.root_config import EVAL, POLICY, RunConfig, section_of


@dataclass(frozen=True)
class RunPlan:
    """A resolved config and its consequences. The reader of configs makes it, and commands hand it on.

    Args:
        config: Resolved config.
        plugin: Plugin of its algorithm; `SINGLE_MODEL` for a model without a run.
        backends: Training backends and generation engine that it chooses.
        raw: Values that the user wrote; None for a config that was changed since.
    """

    config: RunConfig
    plugin: AlgorithmPlugin
    backends: Backends
    raw: RawConfig | None = None

    @classmethod
    def of(cls, config: RunConfig, raw: RawConfig | None = None) -> RunPlan:
        """Plan a resolved config.

        Raises:
            ProblemError: If it enables two training backends for a model, or none.
        """
        plugin = plugin_of(config)
        return cls(config, plugin, backends_of(plugin, config), raw)

    @property
    def root(self) -> Config:
        """The config, to be written or compared as a whole."""
        return cast(Config, self.config)

    @property
    def resolved(self) -> Resolved[Config]:
        """The config with the origins of its values."""
        assert self.raw is not None, "the plan of a config that was read"
        return Resolved(self.root, self.raw)

    def unused_backends(self) -> Iterator[tuple[str, str, str]]:
        """Yield the sections of backends and engines that the run does not use, by dotted key, each with the key that
        chooses another, and the override that would choose this one."""
        used = {model.section: model.plugin.key for model in self.backends.models.values()}
        for section in used.keys() & set(self.model_sections):
            for each in plugins(POLICIES).values():
                if each.key != used[section]:
                    yield (
                        f"{section}.{each.key}",
                        f"{section}.{used[section]}.enabled",
                        f"{section}.{each.key}.enabled=true",
                    )
        generation = self.backends.generation
        for each in plugins(GENERATORS).values() if generation is not None else ():
            if generation is not None and each.key != generation.plugin.key:
                choice = f"{POLICY}.generation.backend"
                yield f"{POLICY}.generation.{each.key}", choice, f"{choice}={each.name}"

    def without_unused(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the config as a tree of plain values, without the sections of `unused_backends`. It reads back to
        the same run, whereas keys of an unused backend next to the choice of another are refused."""
        for key, *_ in self.unused_backends():
            tree = without(tree, tuple(key.split(".")))
        return tree

    @cached_property
    def algorithm(self) -> Algorithm[Any, Any, Any]:
        """The implementation of the algorithm; imported at first use."""
        return implementation_of(self.plugin)

    @property
    def model_sections(self) -> tuple[str, ...]:
        """Dotted keys of the sections that hold models."""
        return model_keys(self.plugin, self.config)

    @property
    def device(self) -> Device:
        """The device of the models; asks the machine, or the cluster at RAY_ADDRESS."""
        return resolve_device(self.config.cluster)

    def section(self, key: str) -> Any:
        """Return the section of the config at a dotted key."""
        return section_of(self.config, key)

    def with_config(self, config: RunConfig) -> RunPlan:
        """Plan a changed config of the same algorithm."""
        return replace(self, config=config, backends=backends_of(self.plugin, config), raw=None)

    def without_models(self) -> RunPlan:
        """Plan generation only, with the weights in the config."""
        return replace(self, backends=replace(self.backends, models={}))

    def for_evaluation(self) -> RunPlan:
        """Plan generation with the weights in the config, and the models that judge."""
        judges = {role: model for role, model in self.backends.models.items() if model.section.startswith("judges.")}
        return replace(self, backends=replace(self.backends, models=judges))


def plugin_of(config: RunConfig) -> AlgorithmPlugin:
    """Return the plugin of a resolved config's algorithm; `SINGLE_MODEL` for a model without a run."""
    keys = type(cast(Config, config)).model_fields
    if "algorithm" not in keys:
        return SINGLE_MODEL
    found = algorithm_named(config.algorithm)
    return found.scoring or found if EVAL in keys else found


def without(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return nested plain values without the key at a path."""
    head, *rest = path
    if head not in tree:
        return tree
    if rest:
        return {**tree, head: without(tree[head], tuple(rest))}
    return {key: value for key, value in tree.items() if key != head}
