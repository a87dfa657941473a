"""Pages of the recipes: command, file, keys that differ from the defaults, and measured results."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from pathlib import Path

from rl_core.config import Config, changed_to_yaml
from rl_launch.commands.catalog import Recipe, recipes
from rl_launch.commands.recipe_files import recipe_text
from rl_launch.run_config.reading import read_plan
from website.reference.text import block, code, prose, table

FOLDER = "recipes"
_RESULTS = "benchmarks/results/learning.md"
_OPENING = """# Recipes

A recipe is a config that comes with rl-launch. `rl train NAME` runs it, `rl init NAME` copies it to a file that you can
edit, and [recipes and config](../recipes-and-config.md) describes how to write one.

"""
_CHANGED = """These are the recipe's own keys and the keys of the recipes that it inherits from, as
`rl config show {} --changed` prints them."""
_MEASURED = """Start and end of its metrics in three seeds, with the settings of the benchmark
`benchmarks/learning.py` ({}), and the curves of all its recipes:"""


def pages(root: Path) -> dict[str, str]:
    """Return the text of each page by its place: an index, and a page for each recipe.

    Args:
        root: Folder of the checkout, whose benchmarks have the curves.
    """
    found, measured = recipes(), _measured(root)
    index = _OPENING + "\n".join(
        f"## {purpose}\n\n{table(('recipe', 'algorithm', 'model', 'size', 'about'), map(_row, group))}"
        for purpose, group in groupby(found, lambda each: each.purpose)
    )
    return {
        f"{FOLDER}/index.md": index,
        **{f"{FOLDER}/{each.name}.md": _page(each, measured.get(each.name, "")) for each in found},
    }


def _row(each: Recipe) -> tuple[str, ...]:
    return (f"[{code(each.name)}]({each.name}.md)", each.algorithm, prose(each.model), each.size, prose(each.summary))


def _page(recipe: Recipe, measured: str) -> str:
    config = read_plan(recipe.name).root
    parts = [
        f"# {recipe.name}\n\n{prose(recipe.summary)}\n",
        block("sh", f"rl train {recipe.name}"),
        f"Its algorithm is {_algorithm(recipe, config)}.",
        f"\n## File\n\n{block('yaml', recipe_text(recipe.name))}",
        f"## Keys that differ from the defaults\n\n{_CHANGED.format(recipe.name)}\n",
        block("yaml", changed_to_yaml(config)),
    ]
    return "\n".join(parts) + measured


def _algorithm(recipe: Recipe, config: Config) -> str:
    name = code(recipe.algorithm)
    has_section = recipe.algorithm in type(config).model_fields
    return f"[{name}](../reference/config/{recipe.algorithm}.md)" if has_section else name


def _measured(root: Path) -> Mapping[str, str]:
    """Return Markdown about the results of each recipe that a benchmark trains as it is."""
    text = (root / _RESULTS).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found: dict[str, str] = {}
    for name, case in _cases(root).items():
        rows = [line for line in lines if re.match(rf"\| {re.escape(name)} +\|", line)]
        if rows and case not in found:
            found[case] = "\n".join(
                [
                    "\n## Results\n",
                    f"{_MEASURED.format(code(name))}\n",
                    *lines[:2],
                    *rows,
                    f"\n![Curves of every recipe of the benchmark](../{_RESULTS.removesuffix('.md')}.png)\n",
                    f"[How it was measured](../{_RESULTS})\n",
                ]
            )
    return found


@cache
def _cases(root: Path) -> Mapping[str, str]:
    """Return the recipe of each case of the benchmark."""
    path = root / "benchmarks" / "learning.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location("learning", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules.setdefault("learning", importlib.util.module_from_spec(spec))
        spec.loader.exec_module(module)
        return {name: case.recipe for name, case in module.CASES.items()}
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop("learning", None)
