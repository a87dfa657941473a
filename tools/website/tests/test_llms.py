"""`llms.txt` lists every page of the navigation with its first sentence."""

from website.llms import full, index

PAGES = {
    "index.md": "# rl\n\n![figure](a.png)\n\nTrains models. And more.\n",
    "a.md": "# `a` { #a }\n\n| x |\n\nThe first page,\nwrapped. The rest.\n",
    "b/c.md": "# C\n",
}
NAVIGATION = [{"Home": "index.md"}, {"Start": ["a.md", {"Deeper": ["b/c.md"]}]}]


def test_pages_are_listed_by_section():
    expected = "# rl\n\n> Trains models.\n\n## Start\n\n- [a](a.html): The first page, wrapped.\n- [C](b/c.html)\n"
    assert index(NAVIGATION, PAGES) == expected


def test_the_full_text_has_the_order_of_the_navigation():
    assert full(NAVIGATION, PAGES) == PAGES["index.md"] + "\n" + PAGES["a.md"] + "\n" + PAGES["b/c.md"]
