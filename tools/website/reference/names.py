"""Pages of the public names, which mkdocstrings fills from signatures and docstrings."""

from __future__ import annotations

import importlib
from pathlib import Path

from write_api_page import public_packages

from rl_core.testing.public_names import summaries_of
from website.reference.text import code, prose, table

FOLDER = "reference/python"
_OPENING = """# Python

These are the names that your code and configs can rely on. Import them from the package that lists them, as in
`from rl_core import Batch`; in a config, write `rl_core:thinking_format`. Modules behind them may move in any release.

"""


def pages() -> dict[str, str]:
    """Return the text of each page by its place: an index, and a page for each package or module with public names."""
    texts, rows = {}, []
    for package in public_packages():
        doc = (importlib.import_module(package).__doc__ or "").partition("\n\n")[0]
        texts[f"{FOLDER}/{package}.md"] = f"# {code(package)}\n\n{prose(doc)}\n\n" + _names(package)
        rows.append((f"[{code(package)}]({package}.md)", prose(doc)))
    return {f"{FOLDER}/index.md": _OPENING + table(("module", "about"), rows), **texts}


def _names(package: str) -> str:
    summaries = summaries_of(package)
    index = table(
        ("name", "about"), ((f"[{code(name)}][{package}.{name}]", prose(text)) for name, text in summaries.items())
    )
    bodies = (f"::: {package}.{name}\n" for name in summaries)
    return index + "\n" + "\n".join(bodies)


def sources(root: Path) -> list[str]:
    """Return the folders in which mkdocstrings finds the packages.

    Args:
        root: Folder of the checkout.
    """
    return [str(path) for path in sorted(root.glob("packages/*/src"))]
