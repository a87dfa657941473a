"""Cases of tests that take long and largely repeat what others do: they run only with `--every-case`.

A `conftest.py` that imports the three hooks has the option and the marker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive
"""Marks such a test."""

_OF_CLASS = "exhaustive_tests"
"""Attribute of a class of tests: its exhaustive tests by name, including tests of its base."""


def partly_exhaustive(cases: Iterable[Any], *, always: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrised test; all but some are exhaustive.

    Args:
        cases: Values of its parameter, or tuples of the values of several.
        always: The cases that run without `--every-case` too.
    """
    cases = list(cases)
    assert all(each in cases for each in always), [each for each in always if each not in cases]
    return [
        each if each in always else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=exhaustive)
        for each in cases
    ]


def with_exhaustive(*names: str) -> Callable[[type], type]:
    """Return a decorator that makes these tests of a class, inherited from another one, exhaustive."""

    def marked(suite: type) -> type:
        assert all(hasattr(suite, name) for name in names), names
        # A mark would stay with the function, which is the other class's as well.
        setattr(suite, _OF_CLASS, getattr(suite, _OF_CLASS, frozenset()) | set(names))
        return suite

    return marked


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--every-case`."""
    parser.addoption("--every-case", action="store_true", help="also the cases that largely repeat others")


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker `exhaustive`."""
    config.addinivalue_line("markers", "exhaustive: takes long and largely repeats others; runs only with --every-case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are marked `exhaustive`, unless every case is asked for."""
    if config.getoption("--every-case"):
        return
    left_out = []
    for item in items:
        of_class = getattr(item.cls, _OF_CLASS, ()) if isinstance(item, pytest.Function) else ()
        if item.get_closest_marker("exhaustive") or getattr(item, "originalname", None) in of_class:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
