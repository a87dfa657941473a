"""Profiles: settings of queues that are the same for all runs at a site, in a file of the user.

`~/.config/rl/submit.yaml` has a section for each target::

    slurm:
      account: team
      partition: gpu
      time_limit: 04:00:00
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_core.config import (
    Config,
    Origin,
    Problem,
    RawConfig,
    Resolved,
    assemble,
    load,
    nearest_as_remedy,
    refusal,
    resolve,
    tree_to_yaml,
)
from rl_core.config.tree import MISSING
from rl_core.errors import ConfigError, ConfigProblems
from rl_launch.submit.targets import TARGETS

DEFAULT = "submit"
"""Name of the profile that is read if none is given, if it exists."""

PROFILE: type[Config] = assemble("Profile", {name: target.settings for name, target in TARGETS.items()})
"""Type of a profile."""


def read_profile(name: str, overrides: Sequence[str] = ()) -> Resolved[Any]:
    """Read a profile and set keys of it.

    Args:
        name: Name of a file in the folder of profiles, without its ending, or a path that ends in `.yaml`. Empty for
            the default profile, if there is one.
        overrides: Keys to set, such as `slurm.partition=gpu`.

    Raises:
        ConfigError: If the profile does not exist, or is not valid; lists all problems.
    """
    return resolve(_raw(name, overrides), PROFILE)


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
    template = tree_to_yaml(_nested(missing)).replace("'???'", "???")
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
    profile = read_profile(name, overrides).config
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


def _nested(keys: Sequence[str]) -> dict[str, Any]:
    """Return a profile in which these keys must be set."""
    tree: dict[str, Any] = {}
    for key in keys:
        *sections, last = key.split(".")
        section = tree
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = MISSING
    return tree


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
