"""The built site, as a reader opens it from `file://`."""

import importlib
import re
from importlib.resources import files

import pytest
from write_api_page import public_packages

pytest.importorskip("zensical", reason="needs the dependency group site")

PAGES = ("index", "reference/config/grpo", "reference/python/rl_launch", "recipes/grpo-arithmetic", "metrics")
SEARCHED = "grpo.num_generations_per_prompt"


def test_every_public_name_is_documented_on_its_page(html):
    for package in public_packages():
        text = (html / f"reference/python/{package}.html").read_text()
        names = set(importlib.import_module(package).__all__) - {"__version__"}
        assert names - set(re.findall(rf'id="{re.escape(package)}\.(\w+)"', text)) == set(), package


def test_pages_load_nothing_from_elsewhere(html):
    remote = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*(?:stylesheet|preconnect)[^>]*https?:")
    assert [path.name for path in html.rglob("*.html") if remote.search(path.read_text())] == []


def test_no_figure_needs_the_network(pages):
    assert [place for place, text in pages.items() if "```mermaid" in text] == []


def test_no_page_shows_a_fence(html):
    assert [path.name for path in html.rglob("*.html") if re.search(r"<p>`{3}\w", path.read_text())] == []


def test_pages_open_without_problems_and_search_finds_a_key(html, page):
    axe = (files("axe_core_python") / "axe.min.js").read_text()
    page.scheme("dark")
    width, scheme = 390, "slate"
    for name in PAGES:
        page.size(width)
        page.open((html / f"{name}.html").as_uri())
        page.wait("document.readyState == 'complete' && document.querySelector('h1')")
        # the scheme of the system on the first page, the chosen one on later pages
        assert page.js(_SCHEME) == scheme, name
        assert page.js("document.documentElement.scrollWidth") <= width, name
        page.js(f"{axe}; 0")
        assert page.js(_serious(_EVERYTHING if name == PAGES[0] else _CONTENT)) == [], (name, scheme)
        width, scheme = (1440, "default") if scheme == "slate" else (390, "slate")
        page.size(width)
        page.js("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
        page.wait(f"{_SCHEME} == '{scheme}'")
        # colours move for a moment
        page.wait("document.getAnimations().every(each => each.playState != 'running')")
        assert page.js("document.documentElement.scrollWidth") <= width, name
        assert page.js(_serious(_CONTENT, _APPEARANCE)) == [], (name, scheme)
    page.size(1440)
    page.js("document.querySelector('.md-search__button').click()")
    page.wait("document.activeElement.matches('input') || document.activeElement.shadowRoot")
    page.call("Input.insertText", text=SEARCHED)
    page.wait(_FOUND)
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "about:", "blob:"))] == []


_SCHEME = "document.body.getAttribute('data-md-color-scheme')"
_EVERYTHING = "document"
_CONTENT = "{exclude: ['.md-header', '.md-tabs', '.md-sidebar--primary', '.md-footer']}"
"""Without the parts that are the same on every page."""

_APPEARANCE = ("color-contrast", "link-in-text-block", "scrollable-region-focusable")
"""Rules that depend on colours or the width; the others read the elements of a page, which are the same in both."""


def _serious(context, rules=()):
    """JavaScript of the serious violations of some rules of axe, or of all."""
    options = f"preload: false, resultTypes: ['violations'], {f'runOnly: {list(rules)}' if rules else ''}"
    return f"""axe.run({context}, {{{options}}}).then(found => found.violations
        .filter(each => ['serious', 'critical'].includes(each.impact))
        .map(each => each.id + ': ' + each.nodes.slice(0, 3).map(node => node.html.slice(0, 120)).join(' | ')))"""


_FOUND = """(function links(root) {
    const all = [...root.querySelectorAll('*')];
    const found = each => each.matches('a[href*="?h="]') ? [each.href] : [];
    return all.flatMap(each => each.shadowRoot ? links(each.shadowRoot) : found(each));
})(document).some(href => href.endsWith('reference/config/grpo.html?h=' + href.split('?h=')[1]))"""
