"""Puts the tools and the browser of the tests of `rl view` on the path, and finds the site that was built."""

import sys
from pathlib import Path

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
