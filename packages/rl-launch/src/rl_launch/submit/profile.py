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
from pathlib import Path
from typing import Any

from rl_core.config import Config, RawConfig, Resolved, assemble, load, nearest_as_remedy, resolve
from rl_core.errors import ConfigError
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


def _raw(name: str, overrides: Sequence[str]) -> RawConfig:
    folder = profiles_folder()
    if name.endswith((".yaml", ".yml")):
        return load(Path(name).expanduser(), overrides)
    path = folder / f"{name or DEFAULT}.yaml"
    if path.is_file():
        return load(path, overrides)
    if not name:
        return load({}, overrides)
    known = [each.stem for each in sorted(folder.glob("*.yaml"))]
    listed = f"{folder} has {', '.join(known)}" if known else f"{folder} has no profiles"
    raise ConfigError(f"there is no profile {name!r}: {listed}. {nearest_as_remedy(name, known)}".rstrip())
