"""Markdown documents whose fenced blocks run as printed.

A test reads a document with `read_document` and hands its blocks in order to `Workbook.run`, which works in one folder
as a reader would:

- A block with a file name is written there. The name is the first line, as a comment (`# my_reward.py`), or a word of
  the fence's info string (`jsonl prompts.jsonl`). Python files are imported as well.
- `python` runs in a new interpreter; a session with `>>>` is a doctest.
- `sh` runs as one script of bash, which ends at the first command that fails.
- `json`, `jsonl` and `toml` are parsed. `yaml` is left to the caller, who knows its schema. `mermaid`, a figure, and
  `text` are not looked at, but a file for `text` is written; `text output` is the output of the block before it,
  with `...` for anything.

Further words of the info string say how a block is tested: `check` if it needs more than a laptop, so that commands are
left to the caller to check, and Python only runs its imports; `fails` if its last command must fail; `in=PACKAGE`
if it needs that package's engine, so that the package's tests run it; and `over=RECIPE` for the recipe that a fragment
of YAML is laid over.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

RUN = frozenset({"python", "sh"})
PARSED = frozenset({"json", "jsonl", "toml", "yaml"})
LANGUAGES = RUN | PARSED | {"mermaid", "text"}
"""Languages that a block may have."""

_DOCUMENTS = (
    "*.md",
    "docs/*.md",
    "docs/concepts/*.md",
    "benchmarks/*.md",
    "packages/*/*.md",
    "packages/*/docs/*.md",
    "packages/*/benchmarks/*.md",
)
_CHANGELOG = "CHANGELOG.md"
_FLAGS = {"check": "checked", "fails": "fails", "output": "is_output"}
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)$")
_FILE_NAME = re.compile(r"^# (?P<name>[\w./-]+\.\w+)$")
_IF_SLOW = re.compile(r"^\d\d:\d\d:\d\d (?:still waiting for|trying the environment) .*\n", re.MULTILINE)
"""Lines that only a busy machine has printed."""

_PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "toml": tomllib.loads,
}
_CONTINUES = re.compile(r"^<!-- continues: (?P<name>[\w./-]+\.md) -->$", re.MULTILINE)


MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""Name of the tiny model of documents on the hub."""


class DocumentError(AssertionError):
    """A block that cannot be tested, or that fails when it runs."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        document: The file that holds it.
        line: Number of the opening fence.
        language: One of `LANGUAGES`.
        text: The lines between the fences, without the indentation of the fence.
        file: The file that it is written to, relative to the document's working folder; empty if there is none.
        checked: True if it is checked and not run.
        fails: True if it must fail.
        is_output: True if it is the output of the block before it.
        package: Whose tests run it; empty for the tests of the whole project.
        over: The recipe that a fragment of YAML is laid over; empty if there is none.
    """

    document: Path
    line: int
    language: str
    text: str
    file: str = ""
    checked: bool = False
    fails: bool = False
    is_output: bool = False
    package: str = ""
    over: str = ""

    @property
    def place(self) -> str:
        """Its file and line, as a test reports them."""
        return f"{self.document.name}, line {self.line}"

    @property
    def imports(self) -> str:
        """The import statements of Python."""
        found = [node for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        return "".join(f"{ast.unparse(node)}\n" for node in found)

    def is_run_by(self, later: Iterable[Block]) -> bool:
        """Return whether one of these blocks runs or imports this Python file, which then needs no import before."""
        path = Path(self.file)
        if path.suffix != ".py":
            return False
        runs = re.compile(
            rf"^python {re.escape(self.file)}(?= |$)|^(?:from|import) {re.escape(path.stem)}(?= |$)", re.M
        )
        counted = (each for each in later if each.language in RUN and not each.checked and not each.fails)
        return any(runs.search(each.text) for each in counted)

    def import_here(self) -> None:
        """Run the imports of Python in this process, for blocks whose packages take long to import.

        Raises:
            DocumentError: If that fails, with the block's place.
        """
        try:
            exec(self.imports, {})
        except Exception as error:
            raise DocumentError(f"{self.place}: {error!r}\n{self.imports}") from error


@dataclass(frozen=True)
class Document:
    """A Markdown file and its blocks.

    Args:
        path: Path of the file.
        text: All of it.
        blocks: Blocks in order.
        continues: The document in whose working folder this one continues; None if it starts in an empty folder.
    """

    path: Path
    text: str
    blocks: tuple[Block, ...]
    continues: Path | None = None


def documents_of(root: Path) -> list[Path]:
    """Return the Markdown documents of a checkout of this project, without changelogs and results of benchmarks."""
    found = {path for pattern in _DOCUMENTS for path in root.glob(pattern) if path.name != _CHANGELOG}
    return sorted(found)


def documents_for(package: str, root: Path) -> list[Document]:
    """Return the documents of a checkout that have blocks which the tests of a package run, only with these blocks."""
    found = []
    for document in map(read_document, documents_of(root)):
        blocks = tuple(block for block in document.blocks if block.package == package)
        if blocks:
            found.append(replace(document, blocks=blocks))
    return found


def read_document(path: Path) -> Document:
    """Return a document with its blocks.

    Raises:
        DocumentError: If a fence has no language, an unknown one or an unknown word, or is not closed.
    """
    text = path.read_text(encoding="utf-8")
    continues = _CONTINUES.search(text)
    before = None if continues is None else path.parent / continues["name"]
    return Document(path, text, tuple(_blocks(path, text)), before)


def _blocks(path: Path, text: str) -> Iterator[Block]:
    opening: re.Match[str] | None = None
    start, lines = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if opening is None:
            if found is not None:
                opening, start, lines = found, number, []
        elif found is not None and not found["info"].strip() and len(found["fence"]) >= len(opening["fence"]):
            yield _block(path, start, opening["info"].split(), lines)
            opening = None
        else:
            lines.append(line.removeprefix(opening["indent"]))
    if opening is not None:
        raise DocumentError(f"{path.name}, line {start}: the block is not closed")


def _block(path: Path, line: int, info: list[str], lines: list[str]) -> Block:
    place = f"{path.name}, line {line}"
    if not info or info[0] not in LANGUAGES:
        allowed = ", ".join(sorted(LANGUAGES))
        raise DocumentError(f"{place}: the language is {info[0] if info else 'missing'}; write one of {allowed}")
    language, *words = info
    first = _FILE_NAME.match(lines[0]) if lines and language not in {"mermaid", "sh", "text"} else None
    settings: dict[str, Any] = {name: word in words for word, name in _FLAGS.items()}
    settings |= {"file": first["name"] if first else "", "package": "", "over": ""}
    for word in words:
        if word in _FLAGS:
            continue
        key, equals, value = word.partition("=")
        if equals and value and key in {"in", "over"}:
            settings["package" if key == "in" else "over"] = value
        elif "." in word and not equals:
            settings["file"] = word
        else:
            allowed = f"{', '.join(_FLAGS)}, in=PACKAGE, over=RECIPE or a file name"
            raise DocumentError(f"{place}: got {word!r} after {language}; write {allowed}")
    text = "".join(f"{each}\n" for each in lines)
    return Block(path, line, language, text, **settings)


@dataclass
class Workbook:
    """Runs the blocks of a document in one folder.

    Args:
        folder: The working folder, which files are written to and commands run in.
        variables: Environment variables of blocks, in addition to this process's own; None removes one. Without a
            `PATH` among them, the folder of the interpreter comes first in it.
        timeout: Timeout of a block, in seconds.
        printed: Output of the last block.
    """

    folder: Path
    variables: Mapping[str, str | None] = field(default_factory=dict)
    timeout: float = 840
    printed: str = ""

    def run(self, block: Block) -> str:
        """Run, parse or write a block; returns what it printed. Commands that are only checked are left alone.

        Raises:
            DocumentError: If it fails, with its place and its output.
        """
        if block.is_output:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            printed = _IF_SLOW.sub("", self.printed)
            if not doctest.OutputChecker().check_output(block.text, printed, flags):
                raise DocumentError(f"{block.place}: expected\n{block.text}\ngot\n{printed}")
        else:
            self.printed = self._run(block)
        return self.printed

    def write(self, block: Block) -> Path:
        """Write the file of a block as it is, and return its path."""
        path = self.folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        return path

    def _run(self, block: Block) -> str:
        if block.file and self.write(block).suffix == ".py" and block.language != "text":
            # The file's definitions run, and not its part as a script.
            code = f"import runpy; runpy.run_path({block.file!r}, run_name='imported')"
            return self._execute(block, sys.executable, "-c", code)
        if block.language == "sh" and not block.file:
            return "" if block.checked else self._execute(block, "bash", "-euo", "pipefail", "-c", block.text)
        if block.language == "python" and not block.file:
            name = f"{block.document.stem}_line_{block.line}"
            if block.text.startswith(">>>"):
                path = self.folder / f"{name}.txt"
                path.write_text(block.text, encoding="utf-8")
                return self._execute(block, sys.executable, "-m", "doctest", path.name)
            if block.checked:
                return self._execute(block, sys.executable, "-c", block.imports)
            # Processes that the block starts can import a file.
            path = self.folder / f"{name}.py"
            path.write_text(block.text, encoding="utf-8")
            return self._execute(block, sys.executable, path.name)
        try:
            _PARSERS.get(block.language, str)(block.text)
        except ValueError as error:
            raise DocumentError(f"{block.place}: not valid {block.language}: {error}") from None
        return ""

    def _execute(self, block: Block, *command: str) -> str:
        changed: dict[str, str | None] = {**os.environ, **self.variables}
        variables = {name: value for name, value in changed.items() if value is not None}
        # The interpreter's folder comes first, so that `rl` and `python` are the ones under test.
        own, path = str(Path(sys.executable).parent), variables.get("PATH", "")
        if "PATH" not in self.variables and path.split(os.pathsep)[0] != own:
            variables["PATH"] = f"{own}{os.pathsep}{path}"
        if any(self.folder.glob("*.dist-info")):
            # The reader has installed a project.
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.folder), variables.get("PYTHONPATH")]))
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, cwd=self.folder, env=variables, text=True, timeout=self.timeout, check=False, **streams
        )
        if bool(done.returncode) != block.fails:
            raise DocumentError(f"{block.place}: exit code {done.returncode}\n{block.text}\n{done.stdout}")
        return done.stdout


def add_to_hub(cache: Path, name: str, write: Callable[[Path], object]) -> None:
    """Put a model into a cache of the hub (`HF_HUB_CACHE`), so that it is found under its name without a network.

    Args:
        cache: Folder of the cache.
        name: Name on the hub, such as `Qwen/Qwen3-0.6B`.
        write: Writes the model's files into a folder.
    """
    held = cache / f"models--{name.replace('/', '--')}"
    snapshot = held / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    write(snapshot)
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("0", encoding="utf-8")


class EngineDocumentsSuite:
    """Subclass it with the package whose blocks (`in=PACKAGE`) run."""

    package: ClassVar[str]
    root: ClassVar[Path]
    """The checkout."""

    @pytest.fixture(scope="class")
    @classmethod
    def hub(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a cache of the hub that holds a tiny model."""
        from rl_core.testing.torch.reference_model import write_reference_model

        folder = tmp_path_factory.mktemp("hub")
        add_to_hub(folder, MODEL, partial(write_reference_model, seed=0))
        return folder

    def test_blocks_run_as_printed(self, hub: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Run each block; a new interpreter imports the engine again, so only blocks that compute get one."""
        documents = documents_for(self.package, self.root)
        assert documents
        for document in documents:
            folder = tmp_path_factory.mktemp(document.path.stem)
            workbook = Workbook(folder, {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}, timeout=240)
            for number, block in enumerate(document.blocks, 1):
                if block.is_run_by(document.blocks[number:]):
                    workbook.write(block)
                elif block.language == "python" and block.checked and not block.file:
                    block.import_here()
                else:
                    workbook.run(block)
