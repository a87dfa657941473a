"""Documents become pages: info strings are plain, and links lead to pages or to the repository."""

import pytest
from website.source import Checkout, SiteError, place_of, plain_fences


@pytest.fixture
def checkout(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("README.md", "# Home\n")
    write("docs/README.md", "# Guides\n")
    write("docs/first.md", "# First\n")
    write("docs/concepts/step.md", "# Step\n")
    write("docs/figures/step.svg", "<svg/>")
    write("packages/rl-core/README.md", "# rl-core\n")
    write("packages/rl-core/src/rl_core/model.py", "")
    return Checkout(tmp_path)


def plain(text):
    return "".join(line for line, _ in plain_fences(text))


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("sh check", "sh"),
        ("yaml over=grpo-arithmetic", "yaml"),
        ("jsonl prompts.jsonl", "jsonl"),
        ("python check in=rl-dtensor", "python"),
        ("", ""),
        ("text", "text"),
    ],
)
def test_an_info_string_keeps_its_language(info, expected):
    assert plain(f"a\n```{info}\ncode\n```\nb\n") == f"a\n```{expected}\ncode\n```\nb\n"


def test_fences_in_lists_and_in_longer_fences_are_seen():
    assert plain("- a\n\n  ```sh check\n  b\n  ```\n") == "- a\n\n  ```sh\n  b\n  ```\n"
    text = "````text\n```sh check\n```\n````\n"
    assert plain(text) == text


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("docs/first.md", "../README.md", "index.md"),
        ("docs/first.md", "README.md#start", "pages.md#start"),
        ("docs/first.md", "../packages/rl-core", "packages/rl-core/index.md"),
        ("docs/first.md", "../packages/rl-core/README.md#a", "packages/rl-core/index.md#a"),
        ("docs/first.md", "concepts/step.md", "concepts/step.md"),
        ("docs/concepts/step.md", "../first.md", "../first.md"),
        ("packages/rl-core/README.md", "../../docs/first.md", "../../first.md"),
        ("docs/concepts/step.md", "../figures/step.svg", "../figures/step.svg"),
        ("docs/first.md", "#here", "#here"),
        ("docs/first.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_lead_to_pages(checkout, path, target, expected):
    assert checkout.rewritten(f"see [the\n`page`]({target}).", path) == f"see [the\n`page`]({expected})."


def test_links_to_sources_lead_to_the_repository_if_its_address_is_known(checkout):
    text = "[model](../packages/rl-core/src/rl_core/model.py#L3)"
    assert checkout.rewritten(text, "docs/first.md") == "model"
    known = Checkout(checkout.root, "https://example.org/rl/")
    address = "https://example.org/rl/blob/HEAD/packages/rl-core/src/rl_core/model.py#L3"
    assert known.rewritten(text, "docs/first.md") == f"[model]({address})"


def test_links_in_code_stay(checkout):
    text = "```text\n[a](nowhere.md)\n```\n"
    assert checkout.rewritten(text, "docs/first.md") == text


@pytest.mark.parametrize("target", ["nowhere.md", "../../outside.md"])
def test_a_link_to_nothing_is_refused(checkout, target):
    with pytest.raises(SiteError, match=r"docs/first\.md: the link to .* leads to no file"):
        checkout.rewritten(f"[a]({target})", "docs/first.md")


def test_indexes_of_folders_are_their_first_pages():
    places = ("README.md", "docs/README.md", "docs/concepts/README.md", "packages/rl-core/README.md", "CONTRIBUTING.md")
    expected = ["index.md", "pages.md", "concepts/index.md", "packages/rl-core/index.md", "CONTRIBUTING.md"]
    assert [place_of(path) for path in places] == expected
