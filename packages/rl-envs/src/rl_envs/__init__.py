"""Environments that score completions: mathematics, reasoning-gym and reward models."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Here, because the zygote of a sandbox imports this package where rl_core is not installed.
    from rl_core.exports import lazy_exports

    get, _ = lazy_exports(__name__)
    return get(name)


def __dir__() -> list[str]:
    return __getattr__("__all__")
