"""The reference lists every file of a run directory."""

import sys

from document_checks import ROOT


def test_every_file_of_a_run_is_in_the_reference(quickstart, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from website.reference.run_files import is_listed

    try:
        for run in (quickstart / "sft", quickstart / "grpo"):
            files = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
            assert files
            assert [path for path in files if not is_listed(path)] == []
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "website"]:
            sys.modules.pop(name)
