"""Environments of a run by name: installed, configured under `env`, or in a file."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, get_type_hints

from rl_core.config import Config, Problem, ProblemError, did_you_mean, section_of
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.rewards import RewardPart, RewardSum
from rl_core.environments.tool_environment import schemas
from rl_core.exports import public_alternatives
from rl_core.plugins import (
    ENVIRONMENTS,
    EnvironmentPlugin,
    Requirement,
    load_problem,
    plugin,
    plugins,
    requirement_of,
    resolve,
)
from rl_core.user_code import FromFile, is_in_file


@dataclass(frozen=True)
class EnvironmentInstance:
    """An environment of a run.

    Args:
        name: Name in the data.
        environment: `"package.module:Class"`, a class or function in a file of the user's, or several rewards.
        config: Its settings.
        requirement: Requirement of its processes.
        runs_agents: True if it runs agents instead of scoring responses.
        brings_agent: True if these are its own, rather than commands.
    """

    name: str
    environment: str | FromFile | RewardSum
    config: EnvironmentConfig
    requirement: Requirement
    runs_agents: bool = False
    brings_agent: bool = False

    @property
    def is_own(self) -> bool:
        """Return whether it is the user's, rather than installed under a name."""
        return ":" in (self.config.type or self.name) or bool(self.config.rewards)

    def without(self, parts: Collection[str]) -> EnvironmentInstance:
        """Return it without these functions of `rewards`, by reported name."""
        if not parts:
            return self
        assert isinstance(self.environment, RewardSum), "only sections with `rewards` have parts"
        kept = tuple(part for part in self.environment.parts if part.name not in parts)
        return replace(self, environment=replace(self.environment, parts=kept))

    def only(self, parts: Collection[str]) -> EnvironmentInstance:
        """Return an environment of these functions of `rewards` alone, by reported name."""
        assert isinstance(self.environment, RewardSum), "only sections with `rewards` have parts"
        kept = tuple(part for part in self.environment.parts if part.name in parts)
        return replace(self, environment=RewardSum(None, kept), requirement=Requirement("rl-core"))

    @property
    def label(self) -> str:
        """Its name in messages and logs; for one in a file, without the folder."""
        return str(self.environment) if is_in_file(self.name) else self.name


def environment_types(
    written: Any, installed: Mapping[str, EnvironmentPlugin], named: Collection[str] | None = None
) -> dict[str, type[Config]]:
    """Return the types of the sections `env.<name>`: those that the user wrote, and of every installed environment.

    Args:
        written: Plain values of the section `env`, as the user wrote them.
        installed: Environments by name.
        named: Names of the installed environments that get a section without being written; None for all of them.

    Raises:
        ProblemError: If no environment fits a section.
    """
    types: dict[str, type[Config]] = {
        name: found.config for name, found in installed.items() if named is None or name in named
    }
    problems = []
    for name, section in written.items() if isinstance(written, Mapping) else ():
        kind = section.get("type") if isinstance(section, Mapping) else None
        try:
            if isinstance(kind, str):
                types[name] = _section_type(kind, installed)
            elif name in installed:
                types[name] = installed[name].config
            elif isinstance(section, Mapping) and section.get("rewards"):
                types[name] = EnvironmentConfig
            else:
                reason = load_problem(ENVIRONMENTS, name)
                reason = reason or f"{unknown_environment(name, {**installed, **types})}, given as `type` here"
                problems.append(Problem(name, reason))
        except (ValueError, ImportError) as error:
            problems.append(Problem(f"{name}.type", str(error)))
    if problems:
        raise ProblemError(*problems)
    return types


def instance_of(settings: Config, name: str) -> EnvironmentInstance:
    """Return the environment of a name in a dataset. An installed one without a section has its default settings.

    Args:
        settings: The section `env` of a resolved config.
        name: One of its keys or of the installed environments, or `file.py:function`, `package.module:function` or a
            class instead of the function.

    Raises:
        ValueError: If its file cannot be read or has no such name.
    """
    if name in type(settings).model_fields:
        section = getattr(settings, name)
    else:
        section = EnvironmentConfig() if ":" in name else plugin(ENVIRONMENTS, name).config()
    if section.rewards:
        return _with_rewards(name, section)
    return _single(name, section.type or name, section)


def _single(name: str, kind: str, section: EnvironmentConfig) -> EnvironmentInstance:
    """Return the environment of a section, or of none, by its type."""
    if is_in_file(kind):
        return EnvironmentInstance(name, FromFile.read(kind), section, Requirement("rl-core"))
    if ":" in kind:
        return EnvironmentInstance(name, kind, section, requirement_of(kind))
    found: EnvironmentPlugin = plugin(ENVIRONMENTS, kind)
    return EnvironmentInstance(
        name, found.environment, section, found.requirement, found.runs_agents, found.brings_agent
    )


def _with_rewards(name: str, section: EnvironmentConfig) -> EnvironmentInstance:
    """Return the environment of a section with several rewards."""
    rewards, weights = _named_rewards(name, section), section.reward_weights
    if isinstance(weights, Mapping):
        if by_judge := sorted(weights.keys() & section.judged_rewards.keys()):
            raise ValueError(
                f"env.{name}.reward_weights has {by_judge[0]}, which is a reward by a judge; set "
                f"env.{name}.rewards.{by_judge[0]}.weight instead"
            )
        unknown = sorted(weights.keys() - rewards.keys())
        if unknown:
            raise ValueError(f"env.{name}.reward_weights has {', '.join(unknown)}, which is not in `rewards`")
    elif isinstance(section.rewards, Mapping):
        first = next(iter(section.rewards))
        raise ValueError(f"env.{name}.reward_weights is a list, but `rewards` has names; write {{{first}: 1.0}}")
    elif len(weights) != len(rewards):
        raise ValueError(
            f"env.{name}.reward_weights has {len(weights)} weights for {len(rewards)} rewards; give one for each"
        )
    else:
        weights = dict(zip(rewards, weights, strict=True))
    parts = tuple(
        RewardPart(part, FromFile.read(path) if is_in_file(path) else path, weights.get(part, 1.0))
        for part, path in rewards.items()
    )
    if section.type is None:
        return EnvironmentInstance(name, RewardSum(None, parts), section, Requirement("rl-core"))
    inner = _single(name, section.type, section)
    assert not isinstance(inner.environment, RewardSum), "an environment has one section"
    return replace(inner, environment=RewardSum(inner.environment, parts))


def _named_rewards(name: str, section: EnvironmentConfig) -> Mapping[str, str]:
    """Return the functions of a section by reported name. Rewards by judges are not among them."""
    if isinstance(section.rewards, Mapping):
        return {part: path for part, path in section.rewards.items() if isinstance(path, str)}
    names = [path.rpartition(":")[2] for path in section.rewards]
    if len(set(names)) < len(names):
        twice = next(each for each in names if names.count(each) > 1)
        raise ValueError(
            f"env.{name}.rewards has two functions called {twice}; give them names: {{first: file.py:{twice}, ...}}"
        )
    return dict(zip(names, section.rewards, strict=True))


def _installed(instance: EnvironmentInstance) -> EnvironmentPlugin | None:
    """Return the plugin of an installed environment; None for the user's own, and for rewards without another."""
    kind = instance.config.type or instance.name
    if ":" in kind or (isinstance(instance.environment, RewardSum) and instance.environment.environment is None):
        return None
    found: EnvironmentPlugin = plugin(ENVIRONMENTS, kind)
    return found


def row_check_of(instance: EnvironmentInstance) -> Callable[[Mapping[str, Any]], None] | None:
    """Return the check of an environment for the `info` of each row; None if it accepts all rows.

    The check raises `ValueError` for a row that no completion can answer.
    """
    found = _installed(instance)
    if found is None or not found.row_check:
        return None
    check = resolve(found.row_check)

    def checked(info: Mapping[str, Any]) -> None:
        check(info, instance.config)

    return checked


def machine_check_of(instance: EnvironmentInstance) -> Callable[[], str] | None:
    """Return the check of this machine that an environment has; None if it has none.

    The check returns why the environment cannot run here, and what to do; an empty string if it can.
    """
    found = _installed(instance)
    return partial(resolve(found.machine_check), instance.config) if found and found.machine_check else None


def tools_of(instance: EnvironmentInstance) -> tuple[Mapping[str, Any], ...]:
    """Return JSON schemas of the tools that an environment has the policy call; none for most.

    An environment of the user's is imported here to read them, unless it is clearly a function: `tools` of a class or
    of a `rl_core.environments.tool_environment.ToolEnvironment`.

    Raises:
        ValueError: If its file cannot be run here, or a tool has no schema.
    """
    found_at = instance.environment
    environment = found_at.environment if isinstance(found_at, RewardSum) else found_at
    if environment is None:
        return ()
    if (found := _installed(instance)) is not None:
        return schemas(resolve(found.tools)(instance.config)) if found.tools else ()
    if isinstance(environment, FromFile):
        if environment.is_function:
            return ()
        target = environment.load()
    else:
        target = resolve(environment)
    if inspect.isfunction(target) or inspect.getattr_static(target, "tools", None) is None:
        return ()
    return schemas(target.tools)


def problem_with(name: str, settings: Config) -> str:
    """Return the reason that a dataset cannot use this environment; empty if it can, as far as is known without running
    the user's file.

    Args:
        name: Name of the environment; see `instance_of`.
        settings: The section `env` of a resolved config.
    """
    is_section = name in type(settings).model_fields
    if ":" not in name and not is_section:
        known = environment_names(settings)
        return "" if name in known else unknown_environment(name, known)
    try:
        if is_section:
            section = getattr(settings, name)
            if not isinstance(section, EnvironmentConfig) or not section.rewards:
                return ""
            for part, path in _named_rewards(name, section).items():
                if ":" not in path:
                    return f"env.{name}.rewards.{part}: {path!r} is not a function; write file.py:function"
                if not is_in_file(path) and (problem := _problem_with_module(path)):
                    return f"env.{name}.rewards.{part}: {problem}"
            _with_rewards(name, section)
            return ""
        if is_in_file(name):
            FromFile.read(name)
            return ""
        return _problem_with_module(name)
    except (ValueError, ImportError) as error:
        return str(error)


def _problem_with_module(path: str) -> str:
    """Return the reason that the module of `package.module:function` cannot be imported; empty if it is installed."""
    module, _, name = path.rpartition(":")
    if importlib.util.find_spec(module) is not None:
        return ""
    public = public_alternatives(module, name)
    remedy = f"use {public[0]}" if public else "a function in a file is written file.py:function"
    return f"{path}: the module {module} is not installed; {remedy}"


def environment_names(settings: Config) -> list[str]:
    """Return the names that data may use for an environment: installed ones, and the sections of `env`, sorted."""
    return sorted({*plugins(ENVIRONMENTS), *type(settings).model_fields})


def unknown_environment(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return the message for an environment that cannot be used: its package is broken, or it does not exist."""
    if broken := load_problem(ENVIRONMENTS, name):
        return broken
    listed = f"installed: {', '.join(sorted(known))}" if known else "none is installed"
    return (
        f"no environment {name!r} is installed{did_you_mean(name, known)}; {listed}. Your own environment is a "
        "function in a file: file.py:function"
    )


def _section_type(kind: str, installed: Mapping[str, EnvironmentPlugin]) -> type[Config]:
    """Return the type of a section with this `type`. The settings of a class are those that its constructor takes by
    keyword, or as one object."""
    if ":" not in kind:
        if kind not in installed:
            raise ValueError(unknown_environment(kind, installed))
        return installed[kind].config
    if is_in_file(kind) and FromFile.read(kind).is_function:
        return EnvironmentConfig
    target = resolve(kind)
    if not isinstance(target, type):
        return EnvironmentConfig
    parameters = inspect.signature(target).parameters.values()
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if is_dataclass(target) or not by_position:
        return section_of(target, EnvironmentConfig)
    found = get_type_hints(target.__init__).get(by_position[0])  # type: ignore[misc]  # it is the class's own
    if isinstance(found, type) and issubclass(found, EnvironmentConfig) and not is_in_file(kind):
        return found
    raise ValueError(
        f"{kind} takes {', '.join(by_position)} by position; make its settings keyword-only parameters with types, as "
        "in def __init__(self, *, limit: int = 5)"
    )
