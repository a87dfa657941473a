"""Regular expressions that match alike in every version of Python that the packages support."""

import re

import pytest
from workspace import ROOT

POSSESSIVE_GROUP = re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+|\(\?>")


# Python before 3.11.5, such as that of Debian 12, goes on behind the part of a group that did not match
# (python/cpython#106052); possessive repetitions of single characters are right
@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.glob("packages/*")))
def test_no_group_is_atomic_or_repeated_possessively(package):
    sources = sorted(ROOT.glob(f"packages/{package}/src/**/*.py"))
    assert sources
    assert [path for path in sources if POSSESSIVE_GROUP.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("pattern", [r"(ab)*+", r"(ab)++c", r"(ab)?+", r"(ab){2,3}+", r"(?>ab)"])
def test_such_groups_are_found(pattern):
    assert POSSESSIVE_GROUP.search(pattern)
    assert not POSSESSIVE_GROUP.search(r"(a*+b++c?+)* [(]{3,}+")
