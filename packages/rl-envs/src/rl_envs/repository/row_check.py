"""Check of a row's repository and tests before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_envs.repository.config import RepositoryConfig
from rl_envs.repository.task import check_source, read_task


def check(info: Mapping[str, Any], config: RepositoryConfig) -> None:
    """Raise a `ValueError` if the row has no repository that is there, or no tests."""
    check_source(read_task(info, Path(config.folder)))
