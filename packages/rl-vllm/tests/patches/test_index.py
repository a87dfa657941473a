"""Every patch says what it mends, where upstream, and which test tells when to delete it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDER = TESTS.parent / "src" / "rl_vllm" / "patches"
PATCHES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def documentation(name: str) -> str:
    """The docstring of a module, on one line."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    return " ".join((text or "").split())


def removal_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(?:tests/)?(patches/\w+\.py)::(\w+)`", text)


def test_the_index_lists_every_patch_and_no_other() -> None:
    index = documentation("__init__")
    faults = [name for name in PATCHES for _ in re.findall("- Fault: ", documentation(name))]
    assert re.findall(r"`(\w+)` [^:`]+ 0\.\d+\.\d+ ", index) == faults
    assert re.findall(r"- `(\w+)`:", index) == PATCHES
    assert sorted(removal_tests(index)) == sorted(
        each for name in PATCHES for each in removal_tests(documentation(name))
    )


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_names_its_fault_its_place_upstream_and_a_test_that_exists(name: str) -> None:
    text = documentation(name)
    for part in ("- Fault: ", "- vLLM 0.", "- Upstream: ", "- Delete when "):
        assert part in text
    assert "https://github.com/vllm-project/vllm/" in text or "no upstream issue found on 20" in text
    named = removal_tests(text.partition("- Delete when ")[2])
    assert named
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8")
