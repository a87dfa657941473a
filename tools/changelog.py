"""Changelogs of packages: sections by version, newest first, below `## Unreleased`."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

UNRELEASED = "## Unreleased"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_RELEASE = re.compile(r"(\S+)(?: - (\d{4}-\d{2}-\d{2}))?")


@dataclass(frozen=True)
class Section:
    """A section of a changelog.

    Args:
        version: Released version; None for the section `Unreleased`.
        body: Text below the heading, without surrounding white space.
    """

    version: Version | None
    body: str

    @property
    def entries(self) -> tuple[str, ...]:
        """Entries of the section: list items, each with its continuation lines joined."""
        items = re.split(r"^- ", self.body, flags=re.MULTILINE)[1:]
        return tuple(" ".join(re.split(r"^#", item, flags=re.MULTILINE)[0].split()) for item in items)


def sections(text: str) -> list[Section]:
    """Return the sections of a changelog in the order of the file.

    Args:
        text: Content of a CHANGELOG.md.

    Raises:
        ValueError: if the first section is not `## Unreleased`, a heading is not `## VERSION` or `## VERSION - DATE`,
            or versions do not decrease.
    """
    headings = list(_HEADING.finditer(text))
    if not headings or headings[0][0].strip() != UNRELEASED:
        raise ValueError(f"the first section is not `{UNRELEASED}`; add that heading above the released versions")
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    bodies = [text[heading.end() : end].strip() for heading, end in zip(headings, ends, strict=True)]
    versions = [_version(heading[1].strip()) for heading in headings[1:]]
    for newer, older in itertools.pairwise(versions):
        if newer <= older:
            raise ValueError(f"section {older} is below section {newer}; order the sections from newest to oldest")
    return [Section(version, body) for version, body in zip([None, *versions], bodies, strict=True)]


def released(text: str) -> list[Version]:
    """Return the versions that have a section, newest first."""
    return [section.version for section in sections(text) if section.version is not None]


def with_release(text: str, version: Version, date: str) -> str:
    """Close the section `Unreleased` as a version's and open an empty one above it.

    Args:
        text: Content of a CHANGELOG.md.
        version: Version that is released.
        date: Day of the release, `YYYY-MM-DD`.
    """
    return text.replace(UNRELEASED, f"{UNRELEASED}\n\n## {version} - {date}", 1)


def with_entry(text: str, entry: str) -> str:
    """Add an entry at the top of `### Changed` in the section `Unreleased`, with the heading if it is missing."""
    before, after = text.split(UNRELEASED, 1)
    section, heading, later = after.partition("\n## ")
    above, changed, rest = section.partition("\n### Changed\n")
    if not changed:
        above, rest = f"{above.rstrip()}\n", "\n"
    section = f"{above}\n### Changed\n\n- {entry}\n{rest.lstrip()}"
    return f"{before}{UNRELEASED}{section.rstrip()}\n{heading}{later}"


def _version(title: str) -> Version:
    found = _RELEASE.fullmatch(title)
    try:
        return Version(found[1] if found else title)
    except InvalidVersion as error:
        raise ValueError(f"heading `## {title}` is not `## VERSION - YYYY-MM-DD`") from error
