"""The part of a config that a run directory keeps: the sections of the plugins that the run uses."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_core.config import Config, load, plain, resolve
from rl_core.errors import ConfigError
from rl_core.plugins import ENVIRONMENTS, names, plugin
from rl_launch.root_config import RunConfig
from rl_launch.run_config.plan import RunPlan, without
from rl_launch.run_config.reading import check_environments, of_this_version
from rl_launch.run_config.root_types import type_of
from rl_launch.session.directory.recording import Recording

_ENV = "env"


class RunRecording(Recording):
    """Keep the sections of the training backends, the generation engine and the environments that a run uses. A driver
    with other installed plugins can then resume it.

    Args:
        environments: Names of those that the run uses; None while they are not known, which keeps all.
    """

    def __init__(self, environments: Collection[str] | None = None) -> None:
        self._environments = environments

    def used(self, config: RunConfig, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree without the sections of plugins that the run does not use; the backend that trains a model is
        named as enabled."""
        plan = RunPlan.of(config)
        tree = plan.without_unused(tree)
        used = self._environments
        for name in names(ENVIRONMENTS) if used is not None else ():
            if used is not None and name not in used:
                tree = without(tree, (_ENV, name))
            elif name not in tree[_ENV]:
                # Only rows name it. The recorded defaults keep the run as it is if a later version has others.
                tree = _with(tree, (_ENV, name), plain(plugin(ENVIRONMENTS, name).config()))
        for model in plan.backends.models.values():
            tree = _with(tree, (*model.section.split("."), model.plugin.key, "enabled"), True)
        return tree

    def read(self, path: Path, like: Config) -> Config:
        """The config in the file, of the type that it asks for itself.

        Raises:
            ConfigError: If it uses a plugin that is not installed, or does not fit.
        """
        raw = load(path)
        check_environments(raw)
        raw = of_this_version(raw, type_of(raw), path)
        return resolve(raw, type_of(raw, of_run=True)).config


def recorded_environments(path: Path) -> list[str] | None:
    """The environments that a `config.yaml` has settings for; None if it cannot be read."""
    try:
        return list(load(path).select(_ENV) or {})
    except ConfigError:
        return None


def _with(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**tree, head: _with(tree[head], tuple(rest), value) if rest else value}
