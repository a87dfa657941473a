"""Documents whose blocks run as printed, each once, whichever tests read what they leave behind."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from document_checks import ROOT, check_commands, check_yaml, install

from rl_core import fork_server
from rl_core.testing.documents import Document, Workbook, documents_of, read_document
from rl_core.testing.exhaustive import partly_exhaustive

DOCUMENTS = documents_of(ROOT)
GUIDES = [path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]

RL_MODULES = (
    "rl_launch.cli.app",
    "rl_launch.commands.catalog",
    "rl_launch.commands.explain",
    "rl_launch.commands.train",
)
"""Modules that most commands of `rl` import, which takes longer than all else that they do."""


LONG = (
    "docs/ablations.md",
    "docs/adding-an-algorithm.md",
    "docs/agents.md",
    "docs/data-formats.md",
    "docs/debugging.md",
    "docs/live-learning.md",
    "docs/recipes-and-config.md",
    "docs/resume-and-checkpoints.md",
    "docs/several-agents.md",
    "docs/tools.md",
    "packages/rl-envs/README.md",
    "packages/rl-launch/README.md",
)
"""Documents whose runs take long and are in other tests too."""


def parameters(documents: Sequence[Path]) -> list[Any]:
    """The documents as parameters of a test that runs their blocks."""
    return partly_exhaustive(documents, always=[each for each in documents if name_of(each) not in LONG])


def name_of(path: Path) -> str:
    """The path of a document in the checkout."""
    return str(path.relative_to(ROOT))


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

        return once("document-" + name_of(path).replace(os.sep, "-"), make)

    return work


def run_blocks(document: Document, folder: Path, commands: Path) -> None:
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "OMP_NUM_THREADS": None, "PATH": path}
    workbook = Workbook(folder, variables)
    for block in document.blocks:
        if block.checked and block.language == "sh":
            check_commands(block, folder)
        if not block.package:
            workbook.run(block)
        if Path(block.file).name == "pyproject.toml":
            install(folder / block.file)
        if block.language == "yaml":
            check_yaml(block, folder)
