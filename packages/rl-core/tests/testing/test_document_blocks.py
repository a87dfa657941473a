import os
import sys
from pathlib import Path

import pytest

from rl_core.testing.documents import Document, DocumentError, Workbook, documents_for, read_document


@pytest.fixture
def written(tmp_path):
    """A document of the given lines."""

    def write(*lines: str) -> Document:
        path = tmp_path / "guide.md"
        path.write_text("\n".join(lines) + "\n")
        return read_document(path)

    return write


@pytest.fixture
def workbook(tmp_path) -> Workbook:
    folder = tmp_path / "work"
    folder.mkdir()
    return Workbook(folder, timeout=120)


def outputs(document: Document, workbook: Workbook) -> list[str]:
    return [workbook.run(block) for block in document.blocks]


def test_blocks_have_their_place_language_and_text(written):
    lines = ["# A guide", "```sh", "ls", "```", "- a list", "  ```yaml over=grpo-arithmetic", "  a: 1", "  ```"]
    first, second = written(*lines).blocks
    assert (first.line, first.language, first.text, first.over) == (2, "sh", "ls\n", "")
    assert (second.line, second.language, second.text, second.over) == (6, "yaml", "a: 1\n", "grpo-arithmetic")


def test_a_longer_fence_holds_a_shorter_one(written):
    (block,) = written("````text", "```sh", "ls", "```", "````").blocks
    assert block.text == "```sh\nls\n```\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["```", "ls", "```"], "the language is missing"),
        (["```bash", "ls", "```"], "the language is bash"),
        (["```sh chek", "ls", "```"], "got 'chek' after sh"),
        (["```sh in=", "ls", "```"], "got 'in='"),
        (["text", "```sh", "ls"], "line 2: the block is not closed"),
    ],
)
def test_a_fence_that_cannot_be_tested_is_refused(written, lines, message):
    with pytest.raises(DocumentError, match=message):
        written(*lines)


def test_a_figure_is_not_looked_at(written, tmp_path):
    (block,) = written("```mermaid", "# figure.py", "flowchart TD", "```").blocks
    assert (block.language, block.file) == ("mermaid", "")
    assert Workbook(tmp_path).run(block) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["guide.md"]


def test_words_of_the_fence_say_how_a_block_is_tested(written):
    checked, engine, data = written(
        "```sh check", "ls", "```", "```python in=rl-dtensor", "pass", "```", "```jsonl data/a.jsonl", "{}", "```"
    ).blocks
    assert (checked.checked, engine.package, data.file) == (True, "rl-dtensor", "data/a.jsonl")


def test_a_comment_in_the_first_line_of_a_script_of_the_shell_names_no_file(written):
    (block,) = written("```sh", "# see notes.txt", "```").blocks
    assert not block.file


def test_a_document_names_the_one_that_it_continues(written, tmp_path):
    assert written("# A").continues is None
    assert written("# A", "", "<!-- continues: first-run.md -->").continues == tmp_path / "first-run.md"


def test_files_are_written_and_used_by_later_blocks(written, workbook):
    sums = ["import json", "from lib.numbers_of import TWO", "print(TWO + json.load(open('rows.jsonl'))['a'])"]
    document = written(
        *["```python", "# lib/numbers_of.py", "TWO = 2", "```"],
        *["```jsonl rows.jsonl", '{"a": 3}', "```"],
        *["```python", *sums, "```"],
        *["```sh", "wc -l < rows.jsonl", "```"],
    )
    assert outputs(document, workbook) == ["", "", "5\n", "1\n"]


def test_a_python_file_is_imported_and_not_run(written, workbook):
    lines = ["# a.py", "print('imported')", "if __name__ == '__main__':", "    raise ValueError"]
    assert outputs(written("```python", *lines, "```"), workbook) == ["imported\n"]


def test_python_that_is_only_checked_imports_what_it_names(written, workbook):
    lines = ["import json", "def main():", "    from pathlib import Path", "    print(json, Path)", "raise ValueError"]
    assert outputs(written("```python check", *lines, "```"), workbook) == [""]
    with pytest.raises(DocumentError, match="no_such_module"):
        outputs(written("```python check", "def main():", "    import no_such_module", "```"), workbook)


def test_what_python_names_is_imported_in_this_process_too(written):
    lines = ["```python check", "import json", "1 / 0", "```", "```python", "import no_such_module", "```"]
    fine, missing = written(*lines).blocks
    fine.import_here()
    with pytest.raises(DocumentError, match=r"line 5: .*no_such_module"):
        missing.import_here()


@pytest.mark.parametrize(
    ("lines", "is_run"),
    [
        (["```sh", "python a.py --fast", "```"], True),
        (["```python", "# b.py", "from a import x", "```"], True),
        (["```sh fails", "python a.py", "```"], False),
        (["```sh check", "python a.py", "```"], False),
        (["```sh", "python a.pyx", "```"], False),
        (["```python", "import ab", "```"], False),
        (["```text", "python a.py", "```"], False),
    ],
)
def test_a_python_file_that_a_later_block_runs_needs_no_import_of_its_own(written, lines, is_run):
    file, *later = written("```python", "# a.py", "x = 1", "```", *lines).blocks
    assert file.is_run_by(later) == is_run
    assert not later[0].is_run_by([file])


def test_commands_that_are_only_checked_do_not_run(written, workbook):
    assert outputs(written("```sh check", "touch here", "```"), workbook) == [""]
    assert not (workbook.folder / "here").exists()


def test_a_package_finds_its_blocks_in_all_documents(tmp_path):
    for name, package in (("README.md", "rl-a"), ("docs/guide.md", "rl-b"), ("packages/rl-a/CHANGELOG.md", "rl-b")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"```python in={package}\n1\n```\n```sh\n```\n")
    (document,) = documents_for("rl-b", tmp_path)
    assert [block.place for block in document.blocks] == ["guide.md, line 1"]


def test_a_session_is_a_doctest(written, workbook):
    outputs(written("```python", ">>> 1 + 1", "2", "", "```"), workbook)
    with pytest.raises(DocumentError, match="Got:\n    2"):
        outputs(written("```python", ">>> 1 + 1", "3", "", "```"), workbook)


@pytest.mark.parametrize(
    "lines",
    [
        ["```sh", "false", "true", "```"],
        ["```sh", "false | true", "```"],
        ["```sh", 'echo "$UNSET_VARIABLE"', "```"],
        ["```python", "raise ValueError", "```"],
        ["```python", "# a.py", "import no_such_module", "```"],
        ["```json", "{", "```"],
        ["```jsonl", "{}", "{", "```"],
        ["```toml", "a", "```"],
    ],
)
def test_a_block_that_fails_is_reported_with_its_place(written, workbook, lines):
    with pytest.raises(DocumentError, match=r"guide\.md, line 1"):
        outputs(written(*lines), workbook)


def test_what_a_block_prints_is_compared_with_the_output_that_is_shown(written, workbook):
    outputs(written("```sh", "printf 'a  1\\nb\\nc\\n'", "```", "```text output", "a 1", "...", "c", "```"), workbook)
    with pytest.raises(DocumentError, match=r"guide\.md, line 4: expected\nb"):
        outputs(written("```sh", "echo a", "```", "```text output", "b", "```"), workbook)


def test_output_of_a_busy_machine_is_that_of_a_quiet_one(written, workbook):
    slow = "12:00:05 trying the environment x on the first rows takes more than 5 s"
    outputs(written("```sh", f"printf 'a\\n{slow}\\nb\\n'", "```", "```text output", "a", "b", "```"), workbook)


def test_a_command_may_have_to_fail(written, workbook):
    assert outputs(written("```sh fails", "echo why", "false", "```"), workbook) == ["why\n"]
    with pytest.raises(DocumentError, match="exit code 0"):
        outputs(written("```sh fails", "true", "```"), workbook)


def test_commands_of_the_interpreter_come_first_unless_a_path_is_given(written, workbook, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho another\n")
    python.chmod(0o755)
    block = written("```sh", "python -c 'import sys; print(sys.executable)'", "```")
    assert outputs(block, workbook) == [f"{sys.executable}\n"]
    given = Workbook(workbook.folder, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert outputs(block, given) == ["another\n"]


def test_commands_see_the_given_variables(written, tmp_path):
    workbook = Workbook(tmp_path, {"COLOUR": "blue", "HOME": None})
    found = outputs(written("```sh", "echo $COLOUR ${HOME:-homeless}", "pwd", "```"), workbook)
    assert found == [f"blue homeless\n{Path(tmp_path).resolve()}\n"]
