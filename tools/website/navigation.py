"""The navigation of the site, in the order of the index of the guides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from website.source import SiteError, place_of

SECTIONS = ("Start", "Guides", "Concepts", "Recipes", "Reference", "Troubleshooting", "Comparison", "Contribute")
"""Sections of the navigation; headings of the second level of the index place pages in them."""

_LINE = re.compile(r"^(?P<level>##+) (?P<heading>.+)$|\]\((?P<target>[^)#\s]+\.md)(?:#[^)\s]*)?\)", re.MULTILINE)

Entries = list[Any]
"""Places of pages, and groups as mappings of one name to entries, as mkdocs.yml has them."""


def navigation(index: str, index_path: str, pages: Mapping[str, str], further: Mapping[str, Entries]) -> Entries:
    """Return the navigation.

    A section has the pages that the index links to below its heading, in that order and in groups by its headings of
    the third level; then the page that has its name (`troubleshooting.md`) and the pages of the folder that has its
    name (`concepts/`), the index of the folder first and others in its order; then further entries. A section without
    pages is left out.

    Args:
        index: Text of the index.
        index_path: Path of the index in the checkout.
        pages: Markdown of each page that needs a place in the navigation, by its place.
        further: Further entries of sections.

    Raises:
        SiteError: if the index has an unknown section, or a page is in no section.
    """
    sections: dict[str, Entries] = {name: [] for name in SECTIONS}
    section, target, listed = "", list[Any](), set[str]()
    for found in _LINE.finditer(index):
        heading = found["heading"]
        if found["level"] == "##":
            if heading not in sections:
                raise SiteError(f"{index_path}: {heading!r} is not a section; allowed: {', '.join(SECTIONS)}")
            section, target = heading, sections[heading]
        elif found["level"] == "###":
            target = []
            sections[section].append({heading: target})
        elif found["target"] and section:
            place = place_of(_joined(index_path, found["target"]))
            if place not in listed:
                listed.add(place)
                target.append(place)
    listed.update(places_in(list(further.values())))
    rest = sorted(set(pages) - listed)
    for name, entries in sections.items():
        folder = name.lower()
        own = [place for place in rest if place.startswith((f"{folder}/", f"{folder}.md"))]
        # the page of the section, its index, pages that the index links to, others
        first = [f"{folder}.md", f"{folder}/index.md", *_linked_from(f"{folder}/index.md", pages)]
        own.sort(key=lambda place: first.index(place) if place in first else len(first))
        entries += own
        entries += further.get(name, [])
        listed.update(own)
    missing = [place for place in rest if place not in listed]
    if missing:
        raise SiteError(f"docs/{missing[0]}: the page is in no section of the site; link to it in {index_path}")
    return [{name: entries} for name, entries in sections.items() if entries]


def _linked_from(place: str, pages: Mapping[str, str]) -> list[str]:
    """Return the places that a page links to, in order."""
    targets = (found["target"] for found in _LINE.finditer(pages.get(place, "")))
    return list(dict.fromkeys(_joined(place, target) for target in targets if target))


def places_in(entries: Any) -> Iterator[str]:
    """Yield the places in entries of a navigation, in order."""
    if isinstance(entries, str):
        yield entries
    else:
        for each in entries.values() if isinstance(entries, Mapping) else entries:
            yield from places_in(each)


def _joined(path: str, target: str) -> str:
    parts = list[str](PurePosixPath(path).parent.parts)
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
