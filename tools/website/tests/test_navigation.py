"""The navigation follows the index of the guides and the folders of its sections."""

import pytest
from website.navigation import navigation, places_in
from website.source import SiteError

INDEX = """# Guides

## Start

- [b](b.md), [a](a.md#x)

## Guides

### Runs

| [c](c.md) | about |

### Scale

[d](d.md), [a](a.md) again

## Contribute

[rules](../RULES.md)
"""
PAGES = dict.fromkeys(["a.md", "b.md", "c.md", "d.md", "RULES.md"], "")


def made(pages, further=None):
    return navigation(INDEX, "docs/README.md", pages, further or {})


def test_pages_have_the_order_of_the_index():
    assert made(PAGES) == [
        {"Start": ["b.md", "a.md"]},
        {"Guides": [{"Runs": ["c.md"]}, {"Scale": ["d.md"]}]},
        {"Contribute": ["RULES.md"]},
    ]


def test_a_section_has_its_folder_its_page_and_further_entries():
    own = ["concepts/b.md", "concepts/m.md", "concepts/z.md", "troubleshooting.md", "results/x.md"]
    pages = {**PAGES, **dict.fromkeys(own, ""), "concepts/index.md": "[z](z.md#a), [m](m.md), [a](../a.md)"}
    found = made(pages, {"Concepts": [{"Results": ["results/x.md"]}]})
    results = {"Results": ["results/x.md"]}
    assert found[2] == {"Concepts": ["concepts/index.md", "concepts/z.md", "concepts/m.md", "concepts/b.md", results]}
    assert found[3] == {"Troubleshooting": ["troubleshooting.md"]}
    assert sorted(places_in(found)) == sorted(pages)


def test_a_page_without_a_section_is_refused():
    with pytest.raises(SiteError, match=r"docs/lost\.md: .* link to it in docs/README\.md"):
        made({**PAGES, "lost.md": ""})


def test_an_unknown_section_is_refused():
    with pytest.raises(SiteError, match="'Startt' is not a section; allowed: Start, Guides"):
        navigation("## Startt\n", "docs/README.md", {}, {})
