"""Build the documentation site in build/site/html; open index.html there, no server is needed.

Every warning of the generator is an error. Needs the dependency group `site`: `uv run tox -e site`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from website.build import build
from website.source import SiteError
from website.versions import LATEST, publish

ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    """Build the site, print where it is, and return 1 if a page is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "site", metavar="FOLDER", help="a folder, which is replaced"
    )
    parser.add_argument("--repository", default="", metavar="URL", help="where the sources that pages link to are")
    parser.add_argument(
        "--publish", type=Path, metavar="FOLDER", help="also put the site into this folder, next to other versions"
    )
    parser.add_argument("--version", default=LATEST, metavar="NAME", help="its name there: latest (default), or 0.2.0")
    options = parser.parse_args(arguments)
    try:
        html = build(ROOT, options.output.absolute(), options.repository)
        if options.publish is not None:
            html = publish(html, options.publish.absolute(), options.version)
    except SiteError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{html / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
