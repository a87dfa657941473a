"""An index of the metrics, from the tables of the glossary that the tests compare with what runs write."""

from __future__ import annotations

import re
from pathlib import Path

from website.reference.text import code, table

PLACE = "reference/metrics.md"
GLOSSARY = "docs/metrics.md"
_LINE = re.compile(r"^(?:#+ (?P<heading>.+)|\| (?P<names>`[^|]+`) \| (?P<meaning>[^|]+) \|.*)$", re.MULTILINE)
_OPENING = """# Metrics by name

Every metric that a run writes, by name. [Metrics](../metrics.md) has their healthy ranges, and what to do if one is
outside.

"""


def pages(root: Path) -> dict[str, str]:
    """Return the text of the page by its place.

    Args:
        root: Folder of the checkout.
    """
    rows, section = [], ""
    for found in _LINE.finditer((root / GLOSSARY).read_text(encoding="utf-8")):
        if found["heading"]:
            section = found["heading"]
        else:
            meaning = re.sub(r"\]\((?!\w+:|#)", "](../", found["meaning"]).replace("](#", "](../metrics.md#")
            link = f"[{section}](../metrics.md#{_anchor(section)})"
            rows += [(code(name), meaning, link) for name in re.findall("`(.+?)`", found["names"])]
    return {PLACE: _OPENING + table(("metric", "meaning", "of"), sorted(rows))}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
