"""Every Markdown document of the project is correct: its blocks run as printed, or are checked."""

import re
import sys

import pytest
from document_checks import (
    ROOT,
    broken_links,
    missing_places,
    private_names,
    text_of_notebook,
    unknown_commands,
    unknown_keys,
)
from document_runs import DOCUMENTS, GUIDES, name_of, parameters
from quoted_messages import quoted_messages, unknown_messages

from rl_algos.rollouts.driver.draw import DrawState
from rl_core.facts.vllm_readings import READINGS
from rl_core.testing.documents import read_document

NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
CHANGELOGS = sorted(ROOT.glob("packages/*/CHANGELOG.md"))

INTERNAL = {ROOT / "docs" / "architecture.md", ROOT / "docs" / "service-names.md", ROOT / "AGENTS.md"}
"""Documents for those who change the packages, which name modules."""

READ_IN_PARTS = {"api.md", "service-names.md", "metrics.md", "architecture.md"}
"""Guides that nobody reads from start to end: references, which are looked up, and the map of the code."""

MAX_WORDS = 2000
"""Ten minutes at 200 words a minute, tables and code included."""

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)


@pytest.mark.parametrize("path", parameters([path for path in DOCUMENTS if path not in GUIDES]), ids=name_of)
def test_blocks_run_as_printed(path, worked):
    worked(path)


@every_document
def test_links_lead_somewhere(path):
    assert broken_links(read_document(path)) == []


@every_document
def test_files_modules_and_tests_exist(path):
    assert missing_places(read_document(path)) == []


@every_document
def test_config_keys_exist(path):
    assert unknown_keys(read_document(path)) == []


@pytest.mark.parametrize("path", [path for path in GUIDES if path.name not in READ_IN_PARTS], ids=name_of)
def test_a_guide_takes_at_most_ten_minutes_to_read(path):
    assert len(path.read_text(encoding="utf-8").split()) <= MAX_WORDS


def test_quoted_messages_are_printed():
    page = read_document(ROOT / "docs" / "messages.md")
    assert len(quoted_messages(page)) > 30
    assert unknown_messages(page) == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path not in INTERNAL], ids=lambda path: path.name)
def test_names_of_the_packages_are_public(path):
    assert private_names(read_document(path).text) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_names_in_a_notebook_are_public(path):
    assert private_names(text_of_notebook(path)) == []


def test_the_pages_of_public_and_service_names_are_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import write_api_page

    try:
        for path, text in write_api_page.pages().items():
            assert path.read_text(encoding="utf-8") == text
    finally:
        sys.modules.pop("write_api_page")


@pytest.mark.parametrize("path", [*DOCUMENTS, *NOTEBOOKS, *CHANGELOGS], ids=name_of)
def test_commands_in_the_text_exist(path):
    text = text_of_notebook(path) if path in NOTEBOOKS else path.read_text(encoding="utf-8")
    assert unknown_commands(text) == []


@every_document
def test_blocks_that_need_an_engine_run_in_a_package_that_runs_documents(path):
    for block in read_document(path).blocks:
        tests = ROOT / "packages" / block.package / "tests"
        assert not block.package or list(tests.rglob("test_documents.py")), block.place


def test_the_page_and_the_figure_have_every_state_of_a_draw():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("### A draw of the rollout source")[2].partition("###")[0]
    states = [state.value for state in DrawState]
    assert re.findall(r"^\| ([a-z ]+) \|", section, re.MULTILINE) == ["state", *states]
    figure = (ROOT / "docs" / "figures" / "draw.svg").read_text(encoding="utf-8")
    assert sorted(re.findall(r'title" [^>]*>([a-z ]+)<', figure)) == sorted([*states, "trained"])


def test_grpo_is_read_in_at_most_sixty_files():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(\d+)\. `([\w/]+\.py)`", page.partition("Read GRPO in an afternoon")[2], re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert 40 < len(listed) <= 60
    sources = [ROOT / "packages" / path.partition("/")[0].replace("_", "-") / "src" / path for _, path in listed]
    assert [str(path) for path in sources if not path.is_file()] == []


def test_the_page_lists_what_vllm_reads_differently():
    page = (ROOT / "docs" / "model-families.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    listed = {row[0].removeprefix("| "): row[1] for row in rows if len(row) > 1}
    expected = {each.models: ("On CPU, " if each.on_cpu else "") + each.difference for each in READINGS}
    assert {models: listed.get(models) for models in expected} == expected
