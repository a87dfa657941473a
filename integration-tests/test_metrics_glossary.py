"""The glossary of metrics has every name that a run writes, and no other."""

import re
from pathlib import Path

from document_checks import ROOT
from runs import lines_of

from rl_launch.show.terminal import FIRST

GLOSSARY = ROOT / "docs" / "metrics.md"
_ROW = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)
_PLACEHOLDER = re.compile(r"<\w+>")


def documented() -> list[str]:
    """Names in the first column of the glossary's tables."""
    return [name for cell in _ROW.findall(GLOSSARY.read_text(encoding="utf-8")) for name in re.findall("`(.+?)`", cell)]


def test_every_metric_that_a_run_writes_is_in_the_glossary(quickstart):
    patterns = [_PLACEHOLDER.sub(".+", re.escape(name)) for name in documented()]
    written = names_in(quickstart / "sft", quickstart / "grpo")
    assert [name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def test_every_metric_of_the_glossary_is_written_or_in_the_source(quickstart):
    written = names_in(quickstart / "sft", quickstart / "grpo")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "packages").glob("*/src/**/*.py"))
    unknown = [name for name in documented() if name not in written and not is_in(source, name)]
    assert unknown == []


def names_in(*folders: Path) -> list[str]:
    return sorted({name for folder in folders for line in lines_of(folder) for name in line})


def is_in(source: str, name: str) -> bool:
    """Whether a name, or its part after the slash, is a literal in the source."""
    return any(f'"{_PLACEHOLDER.split(part)[0]}' in source for part in (name, name.partition("/")[2]))


def test_the_five_metrics_that_the_glossary_recommends_are_those_of_rl_show():
    sentence = re.search(r"Look at these five first: (.+?)\.\s", GLOSSARY.read_text(encoding="utf-8"), re.DOTALL)
    assert tuple(re.findall("`(.+?)`", sentence[1])) == FIRST
