"""Puts the tools and the browser of the tests of `rl view` on the path, and finds the site that was built."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "packages/rl-launch/tests/view")]


@pytest.fixture(scope="session")
def html() -> Path:
    """The pages of the site."""
    found = ROOT / "build" / "site" / "html"
    if not (found / "llms.txt").is_file():
        pytest.skip("the site is not built: python tools/build_site.py")
    return found


@pytest.fixture(scope="session")
def pages(html: Path) -> dict[str, str]:
    """The Markdown from which the site was built, by place."""
    folder = html.parent / "pages"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.md")}


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page of Chromium."""
    # with the tests of `rl view`, whose folder is on the path from here on
    from browser import PROGRAM, browser

    if PROGRAM is None:
        pytest.skip("no Chromium")
    with browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened
