"""Every Markdown document of the project is correct: its blocks run as printed, or are checked."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from document_checks import (
    ROOT,
    broken_links,
    check_commands,
    check_yaml,
    install,
    missing_places,
    private_names,
    text_of_notebook,
    unknown_commands,
    unknown_keys,
)

from rl_core import fork_server
from rl_core.testing.documents import Document, Workbook, documents_of, read_document

DOCUMENTS = documents_of(ROOT)
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
CHANGELOGS = sorted(ROOT.glob("packages/*/CHANGELOG.md"))

INTERNAL = {ROOT / "docs" / "architecture.md", ROOT / "AGENTS.md"}
"""Documents for those who change the packages, which name modules."""

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


RL_MODULES = (
    "rl_launch.cli.app",
    "rl_launch.commands.catalog",
    "rl_launch.commands.explain",
    "rl_launch.commands.train",
)
"""Modules that most commands of `rl` import, which takes longer than all else that they do."""


@pytest.fixture(scope="session")
def commands(once) -> Path:
    """Folder of the command `rl` as a program that starts with its modules imported."""
    server = fork_server.shell_command(sys.executable, RL_MODULES, idle_s=120)
    script = shlex.quote(str(Path(sys.executable).with_name("rl")))

    def make(folder: Path) -> None:
        folder.mkdir()
        rl = folder / "rl"
        rl.write_text(f'#!/bin/sh\nexec {server} {script} "$@"\n')
        rl.chmod(0o755)

    return once("commands", make)


@pytest.fixture(scope="session")
def worked(once, commands, quickstart):
    """The working folder of a document whose blocks have run, after the quickstart, which makes their model."""

    def work(path: Path) -> Path:
        document = read_document(path)
        before = None if document.continues is None else work(document.continues)

        def make(folder: Path) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            if before is None:
                folder.mkdir()
            else:
                shutil.copytree(before, folder, symlinks=True)
            run_blocks(document, folder, commands)

        return once("document-" + str(path.relative_to(ROOT)).replace(os.sep, "-"), make)

    return work


def run_blocks(document: Document, folder: Path, commands: Path) -> None:
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "OMP_NUM_THREADS": None, "PATH": path}
    workbook = Workbook(folder, variables)
    for block in document.blocks:
        if block.checked:
            check_commands(block, folder)
        if not block.package:
            workbook.run(block)
        if Path(block.file).name == "pyproject.toml":
            install(folder / block.file)
        if block.language == "yaml":
            check_yaml(block, folder)


@every_document
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


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path not in INTERNAL], ids=lambda path: path.name)
def test_names_of_the_packages_are_public(path):
    assert private_names(read_document(path).text) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_names_in_a_notebook_are_public(path):
    assert private_names(text_of_notebook(path)) == []


def test_the_page_of_public_names_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import write_api_page

    try:
        assert write_api_page.PAGE.read_text(encoding="utf-8") == write_api_page.page()
    finally:
        sys.modules.pop("write_api_page")


@pytest.mark.parametrize("path", [*DOCUMENTS, *NOTEBOOKS, *CHANGELOGS], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_text_exist(path):
    text = text_of_notebook(path) if path in NOTEBOOKS else path.read_text(encoding="utf-8")
    assert unknown_commands(text) == []


@every_document
def test_blocks_that_need_an_engine_run_in_a_package_that_runs_documents(path):
    for block in read_document(path).blocks:
        tests = ROOT / "packages" / block.package / "tests"
        assert not block.package or list(tests.rglob("test_documents.py")), block.place
