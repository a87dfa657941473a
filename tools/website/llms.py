"""`llms.txt` and `llms-full.txt`: the site for language models (llmstxt.org)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from website.navigation import Entries, places_in

_TITLE = re.compile(r"^# (.+?)(?: \{.*\})?$", re.MULTILINE)
_NO_SENTENCE = ("#", "|", "```", "<", "-", "!", ":::")


def index(navigation: Entries, pages: Mapping[str, str]) -> str:
    """Return `llms.txt`: the pages by section, each with its title and its first sentence.

    Args:
        navigation: Navigation of the site.
        pages: Markdown of each page by its place; that of the home page opens the file.
    """
    home = pages["index.md"]
    lines = [f"# {_title(home)}\n\n> {_first_sentence(home)}\n"]
    for section in navigation:
        if list(places_in(section)) != ["index.md"]:
            lines += _section(section, pages)
    return "\n".join(lines)


def full(navigation: Entries, pages: Mapping[str, str]) -> str:
    """Return `llms-full.txt`: the Markdown of all pages in the order of the navigation.

    Args:
        navigation: Navigation of the site.
        pages: Markdown of each page by its place.
    """
    return "\n".join(pages[place].rstrip() + "\n" for place in places_in(navigation))


def _section(section: Mapping[str, Any], pages: Mapping[str, str]) -> list[str]:
    (name,) = section
    lines = [f"## {name}\n"]
    for place in places_in(section[name]):
        about = _first_sentence(pages[place])
        target = place.removesuffix(".md") + ".html"
        lines.append(f"- [{_title(pages[place])}]({target}){': ' if about else ''}{about}")
    return [*lines, ""]


def _title(text: str) -> str:
    found = _TITLE.search(text)
    return found[1].replace("`", "") if found else ""


def _first_sentence(text: str) -> str:
    """Return the first sentence of the first paragraph of prose."""
    paragraphs = (part.strip() for part in text.split("\n\n"))
    prose = next((part for part in paragraphs if part and not part.startswith(_NO_SENTENCE)), "")
    return re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(prose.split()), maxsplit=1)[0]
