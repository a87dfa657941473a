"""Markdown of the checkout as pages of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePosixPath

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<fence>`{3,})(?P<info>[^`\n]*)$")
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
_PLACES = {"README.md": "index.md", "docs/README.md": "pages.md"}
_INDEX = "index.md"


class SiteError(ValueError):
    """A site that cannot be built; its message has the page and the remedy."""


@dataclass(frozen=True)
class Checkout:
    """Files of the checkout, and the address where their sources can be read.

    Args:
        root: Folder of the checkout.
        repository: Address of the repository, to which links to sources lead; if empty, they become plain text.
    """

    root: Path
    repository: str = ""

    @cached_property
    def documents(self) -> dict[str, str]:
        """The Markdown files that become pages: place on the site by path in the checkout, `/` between parts."""
        patterns = (
            "*.md",
            "docs/**/*.md",
            "benchmarks/README.md",
            "benchmarks/results/*.md",
            "packages/*/*.md",
            "packages/*/docs/*.md",
        )
        found = {path.relative_to(self.root).as_posix() for pattern in patterns for path in self.root.glob(pattern)}
        return {path: place_of(path) for path in sorted(found)}

    def page(self, path: str) -> str:
        """Return the text of a document as the site has it.

        Args:
            path: Path in the checkout.

        Raises:
            SiteError: if a link leads to a file that does not exist.
        """
        return self.rewritten((self.root / path).read_text(encoding="utf-8"), path)

    def rewritten(self, text: str, path: str) -> str:
        """Return Markdown with plain info strings, and with links that lead to pages of the site or the repository."""
        return "".join(
            chunk if is_code else _LINK.sub(lambda found: self._link(found, path), chunk)
            for is_code, chunk in _chunks(plain_fences(text))
        )

    def _link(self, found: re.Match[str], path: str) -> str:
        name, mark, anchor = found["target"].partition("#")
        if not name or ":" in name:
            return found[0]
        target = PurePosixPath(os.path.normpath(PurePosixPath(path).parent / name)).as_posix()
        here = PurePosixPath(place_of(path)).parent
        if target.startswith("..") or not (self.root / target).exists():
            raise SiteError(f"{path}: the link to {found['target']} leads to no file; correct it")
        documents = self.documents
        place = documents.get(target) or documents.get(f"{target}/README.md")
        if place is None and PurePosixPath(target).suffix in IMAGES:
            place = place_of(target)
        if place is not None:
            return f"{found['text']}({os.path.relpath(place, here)}{mark}{anchor})"
        if self.repository:
            return f"{found['text']}({self.repository.rstrip('/')}/blob/HEAD/{target}{mark}{anchor})"
        return found["text"].removeprefix("!").removeprefix("[").removesuffix("]")


IMAGES = frozenset({".png", ".svg", ".jpg", ".gif"})
"""Suffixes of the images that are copied to the site."""


def place_of(path: str) -> str:
    """Return the place of a file of the checkout in the site's sources.

    Args:
        path: Path in the checkout.
    """
    if path in _PLACES:
        return _PLACES[path]
    place = PurePosixPath(path.removeprefix("docs/"))
    return (place.with_name(_INDEX) if place.name == "README.md" else place).as_posix()


def plain_fences(text: str) -> list[tuple[str, bool]]:
    """Return each line and whether it is a fence or code, with only the language left in the info strings.

    Words after the language say how a block is tested, and would keep Markdown renderers from seeing a fence.
    """
    lines, opening = list[tuple[str, bool]](), ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line.rstrip("\n"))
        if found is None:
            lines.append((line, bool(opening)))
        elif not opening:
            opening = found["fence"]
            language = found["info"].split()[:1]
            lines.append((f"{found['indent']}{opening}{''.join(language)}\n", True))
        else:
            lines.append((line, True))
            if not found["info"].strip() and len(found["fence"]) >= len(opening):
                opening = ""
    return lines


def _chunks(lines: list[tuple[str, bool]]) -> Iterator[tuple[bool, str]]:
    """Yield adjacent lines of one kind together, because the text of a link may be wrapped."""
    for is_code, group in groupby(lines, key=lambda each: each[1]):
        yield is_code, "".join(line for line, _ in group)
