"""Profiles: settings of queues that are the same for all runs at a site, in a file of the user.

`~/.config/rl/submit.yaml` has a section for each target::

    slurm:
      account: team
      partition: gpu
      time_limit: 04:00:00
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_core.config import (
    Config,
    Explanation,
    Origin,
    Problem,
    RawConfig,
    Resolved,
    assemble,
    explain,
    load,
    nearest_as_remedy,
    refusal,
    resolve,
    tree_to_yaml,
    values_of,
)
from rl_core.config.tree import MISSING, format_path
from rl_core.errors import ConfigError, ConfigProblems
from rl_launch.submit.kubernetes.target import KubernetesTarget
from rl_launch.submit.slurm.target import SlurmTarget
from rl_launch.submit.target import QueueTarget

TARGETS: Mapping[str, QueueTarget] = {target.name: target for target in (SlurmTarget(), KubernetesTarget())}
"""Every target by name."""


DEFAULT = "submit"
"""Name of the profile that is read if none is given, if it exists."""

PROFILE: type[Config] = assemble("Profile", {name: target.settings for name, target in TARGETS.items()})
"""Type of a profile."""


def read_profile(target: str, name: str, overrides: Sequence[str] = ()) -> Resolved[Any]:
    """Read the section of a target in a profile and set keys of it. The other sections are not checked: they may refer
    to environment variables that are not set here.

    Args:
        target: Name of the target.
        name: Name of a file in the folder of profiles, without its ending, or a path that ends in `.yaml`. Empty for
            the default profile, if there is one.
        overrides: Keys to set, such as `slurm.partition=gpu`.

    Raises:
        ConfigError: If the profile does not exist, or the section is not valid; lists all problems.
    """
    # messages suggest no keys of the other sections
    section = assemble("Profile", {target: TARGETS[target].settings})
    return resolve(_raw(name, overrides), section, unused=TARGETS.keys() - {target})


def explain_profile(name: str, overrides: Sequence[str] = ()) -> tuple[Sequence[Path], Sequence[Explanation]]:
    """Return the files of a profile, and its sections and keys in order. References to environment variables are shown
    as they are written, and the variables need not be set.

    Args:
        name: See `read_profile`.
        overrides: Keys to set.

    Raises:
        ConfigError: If the profile has problems other than unset variables.
    """
    raw = _raw(name, overrides)
    values = values_of(raw, PROFILE)
    referring = {format_path(path) for path in values.references}
    for target in TARGETS:
        try:
            read_profile(target, name, overrides)
        except ConfigProblems as error:
            if any(problem.key not in referring for problem in error.problems):
                raise

    def below(key: str) -> Iterator[Explanation]:
        for child in explain(PROFILE, key, values).children:
            yield child
            if child.type == "section":
                yield from below(child.key)

    return raw.files, list(below(""))


def refused(problems: Sequence[Problem], target: str, name: str, overrides: Sequence[str] = ()) -> ConfigProblems:
    """Return the error of a profile that lacks what a job needs, with a profile to begin with if there is none.

    Args:
        problems: Problems of the job.
        target: Name of the target.
        name: See `read_profile`.
        overrides: Keys that were set.
    """
    raw = _raw(name, overrides)
    error = refusal(problems, raw)
    missing = [each.key for each in problems if each.key.partition(".")[0] == target]
    if raw.files or not missing:
        return error
    tree: dict[str, Any] = {}
    for key in missing:
        *sections, last = key.split(".")
        section = tree
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = MISSING
    template = tree_to_yaml(tree).replace("'???'", "???")
    explained = f"docs/{target}.md and rl submit profile show all keys"
    advice = f"{_path(name)} does not exist. It may contain ({explained}):\n{template}".rstrip()
    return ConfigProblems(f"{error}\n{advice}", error.problems)


def settings_of(target: str, name: str, overrides: Sequence[str] = ()) -> Any:
    """Return the section of a target in a profile, with interpolations of environment variables known as written.

    Args:
        target: Name of the target.
        name: See `read_profile`.
        overrides: Keys to set.
    """
    profile = read_profile(target, name, overrides).config
    references = {path[1:]: text for path, text in profile.references.items() if path[0] == target}
    return getattr(profile, target).with_references(references)


def belongs_to_profile(override: str) -> bool:
    """Return whether an override on the command line sets a key of a profile, rather than a key of the run."""
    return override.partition("=")[0].partition(".")[0] in TARGETS


def profiles_folder() -> Path:
    """Return the folder of profiles: `rl` in XDG_CONFIG_HOME, which is `~/.config` by default."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rl"


def _path(name: str) -> Path:
    """Return the file of a profile; see `read_profile`."""
    is_path = name.endswith((".yaml", ".yml"))
    return Path(name).expanduser() if is_path else profiles_folder() / f"{name or DEFAULT}.yaml"


def _raw(name: str, overrides: Sequence[str]) -> RawConfig:
    folder, path = profiles_folder(), _path(name)
    if path.is_file() or name.endswith((".yaml", ".yml")):
        return load(path, overrides)
    if not name:
        raw = load({}, overrides)
        return replace(raw, name=str(path), entry=replace(raw.entry, origin=Origin(str(path))))
    known = [each.stem for each in sorted(folder.glob("*.yaml"))]
    listed = f"{folder} has {', '.join(known)}" if known else f"{folder} has no profiles"
    raise ConfigError(f"there is no profile {name!r}: {listed}. {nearest_as_remedy(name, known)}".rstrip())
