"""Places of config keys in the documentation."""

from __future__ import annotations

from importlib.metadata import metadata

_FOLDER = "reference/config"
_UNNAMED = "index"
"""Page of keys that are in no section."""


def page_of(key: str, *, is_section: bool = False) -> str:
    """Return the page and anchor of a config key, relative to the site's root, such as
    `reference/config/grpo.html#grpo.seed`.

    Args:
        key: Dotted; an entry of a list has the place of the list.
        is_section: True if the key is a section, which has a page if it is at the root.
    """
    key = key.partition("[")[0]
    section, dot, _ = key.partition(".")
    return f"{_FOLDER}/{section if dot or is_section else _UNNAMED}.html#{key}"


def address_of(place: str) -> str:
    """Return the address of a place on the site: with the address that this package's metadata have for its
    documentation, and relative to the site's root if they have none.
    """
    urls = dict(url.split(", ", 1) for url in metadata("rl-launch").get_all("Project-URL") or ())
    base = urls.get("Documentation", "")
    return f"{base.rstrip('/')}/{place}" if base else place
