"""Sites of several versions next to one another, with a switcher that needs no server.

FOLDER/index.html        leads to the first version
FOLDER/versions.js       the versions and their pages, for the switcher (assets/site.js)
FOLDER/latest/, FOLDER/0.2.0/, ...
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from website.source import SiteError

LATEST = "latest"
_NAME = re.compile(r"latest|\d+(?:\.\d+)*")
_INDEX = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>rl</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">Documentation of rl</a>
</html>
"""


def publish(html: Path, folder: Path, name: str) -> Path:
    """Put a built site next to those of other versions, in place of one of the same name, and return its folder.

    Args:
        html: Folder of the built site.
        folder: Folder of all versions.
        name: `latest`, or the number of a release, such as `0.2.0`.

    Raises:
        SiteError: if the name is neither.
    """
    if not _NAME.fullmatch(name):
        raise SiteError(f"--version: {name!r} is not a version; pass {LATEST} or a number such as 0.2.0")
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(html, target)
    (target / "assets" / "version.js").write_text(f"window.siteVersion = {json.dumps(name)};\n", encoding="utf-8")
    names = versions(folder)
    listed = [{"name": each, "pages": _pages(folder / each)} for each in names]
    (folder / "versions.js").write_text(f"window.siteVersions = {json.dumps(listed)};\n", encoding="utf-8")
    (folder / "index.html").write_text(_INDEX.format(names[0]), encoding="utf-8")
    return target


def versions(folder: Path) -> list[str]:
    """Return the versions in a folder: `latest`, then releases, newest first.

    Args:
        folder: Folder of all versions.
    """
    found = [path.name for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda name: (name == LATEST, _numbers(name)), reverse=True)


def _numbers(name: str) -> list[int]:
    return [] if name == LATEST else [int(part) for part in name.split(".")]


def _pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
