import runpy

from workspace import ROOT


def test_modules_that_are_begun_first_exist():
    settings = runpy.run_path(str(ROOT / "conftest.py"))
    assert [module for module in settings["LONGEST_FIRST"] if not (settings["PACKAGES"] / module).is_file()] == []
