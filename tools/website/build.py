"""The build of the site: sources in one folder, then Zensical."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from website import llms
from website.navigation import Entries, navigation
from website.reference import choices, commands, errors, keys, metrics, names, recipes, run_files
from website.source import IMAGES, Checkout, SiteError, place_of

_HERE = Path(__file__).parent
_INDEX = "docs/README.md"
_SHIM = "assets/iframe-worker.js"
_REMOTE_SHIM = "https://unpkg.com/iframe-worker/shim"
"""Zensical's offline search loads this script, without which browsers refuse its worker on `file://`."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def build(root: Path, folder: Path, repository: str = "") -> Path:
    """Build the site from a checkout, and return the folder with its pages.

    Args:
        root: Folder of the checkout.
        folder: Folder that is replaced: Markdown in `pages`, the settings in `mkdocs.yml`, the site in `html`.
        repository: See `Checkout`.

    Raises:
        SiteError: if a page or a link is wrong, or Zensical warns of anything.
    """
    shutil.rmtree(folder, ignore_errors=True)
    entries, pages = contents(Checkout(root, repository))
    for place, text in pages.items():
        _write(folder / "pages" / place, text)
    _copy_images(root, folder / "pages")
    shutil.copytree(_HERE / "assets", folder / "pages" / "assets")
    _write(folder / "mkdocs.yml", yaml.safe_dump(_settings(root, entries, repository), sort_keys=False))
    _run_zensical(folder)
    html = folder / "html"
    _use_local_shim(html)
    _use_own_search(html)
    _write(html / "llms.txt", llms.index(entries, pages))
    _write(html / "llms-full.txt", llms.full(entries, pages))
    return html


def contents(checkout: Checkout) -> tuple[Entries, dict[str, str]]:
    """Return the navigation of the site, and the Markdown of each page by its place.

    Raises:
        SiteError: if a page or a link is wrong.
    """
    written = {place: checkout.page(path) for path, place in checkout.documents.items()}
    generated = reference(checkout.root)
    if both := sorted(set(written) & set(generated)):
        raise SiteError(f"docs/{both[0]}: a generated page has this place; rename the page")
    index = (checkout.root / _INDEX).read_text(encoding="utf-8")
    home = ["index.md", place_of(_INDEX)]
    further = {"Start": [{"All pages": home[1]}], **_further(written, generated)}
    entries = navigation(index, _INDEX, {place: text for place, text in written.items() if place not in home}, further)
    return [{"Home": home[0]}, *entries], {**written, **generated}


def reference(root: Path) -> dict[str, str]:
    """Return the Markdown of each generated page by its place.

    Args:
        root: Folder of the checkout.
    """
    return {
        **commands.pages(),
        **keys.pages(),
        **metrics.pages(root),
        **run_files.pages(),
        **choices.pages(),
        **errors.pages(root),
        **names.pages(),
        **recipes.pages(root),
    }


def _further(written: dict[str, str], generated: dict[str, str]) -> dict[str, Entries]:
    """Return the entries of sections that the index does not list: generated pages, packages, results and rules of the
    project."""

    def below(folder: str, pages: dict[str, str]) -> Entries:
        found = [place for place in pages if place.startswith(f"{folder}/")]
        return sorted(found, key=lambda place: (place.rpartition("/")[0], not place.endswith("/index.md"), place))

    return {
        "Recipes": below(recipes.FOLDER, generated),
        "Reference": [
            {"Command line": below(commands.FOLDER, generated)},
            {"Config": below("reference/config", generated)},
            metrics.PLACE,
            run_files.PLACE,
            choices.ENVIRONMENTS,
            choices.DATASETS,
            errors.PLACE,
            {"Python": below(names.FOLDER, generated)},
            {"Packages": below("packages", written)},
        ],
        "Comparison": [{"Results": below("benchmarks/results", written)}],
        "Contribute": ["AGENTS.md", "CODE_OF_CONDUCT.md", "SECURITY.md"],
    }


def _settings(root: Path, entries: Entries, repository: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((_HERE / "mkdocs.yml").read_text(encoding="utf-8"))
    handlers = next(each["mkdocstrings"] for each in settings["plugins"] if "mkdocstrings" in each)["handlers"]
    handlers["python"]["paths"] = names.sources(root)
    return {**settings, **({"repo_url": repository} if repository else {}), "nav": entries}


def _copy_images(root: Path, folder: Path) -> None:
    for source in (root / "docs", root / "benchmarks" / "results", root / "packages"):
        for path in source.rglob("*"):
            if path.suffix in IMAGES and "src" not in path.parts:
                target = folder / place_of(path.relative_to(root).as_posix())
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def _run_zensical(folder: Path) -> None:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        output = _COLOUR.sub("", done.stdout + done.stderr).partition("Traceback")[0].strip()
        raise SiteError(f"zensical: {output}\nCorrect the documents from which {folder / 'pages'} was written.")


def _use_local_shim(html: Path) -> None:
    for page in html.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(html).parts) - 1)
        page.write_text(text.replace(_REMOTE_SHIM, f"{up}{_SHIM}"), encoding="utf-8")
    shutil.copyfile(_HERE / "vendor" / "iframe-worker" / "shim.js", html / _SHIM)


def _use_own_search(html: Path) -> None:
    (worker,) = (html / "assets" / "javascripts" / "workers").glob("search.*.js")
    shutil.copyfile(_HERE / "search_worker.js", worker)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
