"""Places of config keys in the documentation."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import metadata

from rl_core.config import Explanation
from rl_launch.commands.key_search import every_key

_FOLDER = "reference/config"
_UNNAMED = "index"
"""Page of keys that are in no section."""
_GUIDES = {r"(?i)fr[eo]{1,2}z|requires_?grad": "docs/freezing.md"}
"""Guides by a pattern of what users look for."""


def page_of(explanation: Explanation) -> str:
    """Return the page and anchor of a config key, relative to the site's root, such as
    `reference/config/grpo.html#grpo.seed`. An entry of a list has the place of the list.
    """
    key = _without_places(explanation.key)
    section, dot, _ = key.partition(".")
    return f"{_FOLDER}/{section if dot or explanation.type == 'section' else _UNNAMED}.html#{key}"


def address_of(explanation: Explanation) -> str:
    """Return the address of a config key in the documentation. Empty if the metadata of this package has no address of
    the documentation, or if the documentation does not have the key, such as those of your own environments.
    """
    urls = dict(url.split(", ", 1) for url in metadata("rl-launch").get_all("Project-URL") or ())
    base = urls.get("Documentation", "").rstrip("/")
    return f"{base}/{page_of(explanation)}" if base and _without_places(explanation.key) in _documented() else ""


def guide_about(words: str) -> str:
    """Return the guide about something that users look for among the keys and that no key sets; empty if there is
    none.
    """
    return next((guide for found, guide in _GUIDES.items() if re.search(found, words)), "")


@cache
def _documented() -> frozenset[str]:
    return frozenset(each.explanation.key for each in every_key())


def _without_places(key: str) -> str:
    return key.partition("[")[0]
