"""The tables of other systems lead to keys that exist here, and the guides say the same."""

import re
from pathlib import Path

import pytest

from rl_core.config import load
from rl_core.config.keys import key_at
from rl_core.config.tree import parse_path
from rl_core.plugins import ALGORITHMS, algorithm_named, names
from rl_launch.foreign_keys.table import SYSTEMS, Kind, table
from rl_launch.run_config.root_types import root_type

DOCS = Path(__file__).parents[4] / "docs"
GUIDES = {"nemo-rl": "coming-from-nemo-rl.md", "trl": "coming-from-trl.md"}
FREE = re.compile(r"[*A-Z]|FILE|NAME")


@pytest.fixture(scope="module")
def roots():
    return {name: root_type(algorithm_named(name), load({"algorithm": name})) for name in names(ALGORITHMS)}


def exists(key, roots):
    for algorithm, root in roots.items():
        path = parse_path(key.replace("{algorithm}", algorithm).replace("*", "x"))
        if key_at(root, path, {}) is not None:
            return True
    return False


@pytest.mark.parametrize("system", SYSTEMS)
def test_renamed_keys_exist_here(system, roots):
    renamed = [rule for rule in table(system).rules if rule.kind is Kind.RENAMED]
    assert renamed
    assert [rule.text for rule in renamed if not exists(rule.text, roots)] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_keys_that_others_are_worked_out_into_exist_here(system, roots):
    lost = []
    for rule in table(system).rules:
        if rule.kind is Kind.FOLLOWS:
            named = re.match(r"(\{algorithm\}|[a-z_]+)(\.[a-z_0-9]+)+", rule.text)
            if named is not None and not exists(named[0], roots):
                lost.append(f"{rule.pattern}: {named[0]}")
    assert lost == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_has_one_answer(system):
    patterns = [rule.pattern for rule in table(system).rules]
    assert sorted({each for each in patterns if patterns.count(each) > 1}) == []


@pytest.mark.parametrize("system", GUIDES)
def test_the_guide_agrees_with_the_table(system):
    known, told = table(system), 0
    for line in (DOCS / GUIDES[system]).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 2:
            continue
        for name in re.findall(r"`([a-z][a-z0-9_.]*)", cells[0]):
            rule = known.rule(name)
            if rule is not None and rule.kind is Kind.RENAMED and "*" not in rule.text:
                told += 1
                last = rule.text.rpartition(".")[2]
                assert last in cells[1] or last in cells[0], f"{name} is {rule.text}, the guide says: {cells[1]}"
            elif rule is not None and rule.kind is Kind.REFUSED:
                told += 1
                assert "not offered" in cells[1], f"{name} is refused, the guide says: {cells[1]}"
    assert told >= 2
