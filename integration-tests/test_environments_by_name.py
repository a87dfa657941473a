"""The page of environments by name: what it calls ours exists, under these names."""

import re
from importlib.metadata import requires
from importlib.util import find_spec

import pytest
from document_checks import ROOT

from rl_algos.data.processors import PROCESSORS
from rl_core import resolve
from rl_core.plugins import DATASETS, ENVIRONMENTS, plugins
from rl_launch.recipes import recipe_names

PAGE = (ROOT / "docs/environments-by-name.md").read_text(encoding="utf-8")
ROWS = [tuple(cell.strip() for cell in row) for row in re.findall(r"^\|([^|\n]+)\|([^|\n]+)\|([^|\n]+)\|$", PAGE, re.M)]
ROWS = [row for row in ROWS if row[0] != "name" and not row[0].startswith("---")]
OURS = [row for row in ROWS if row[1] == "ours"]


TASKS = {
    "reasoning_gym": "reasoning_gym.factory:DATASETS",
    "textarena": "textarena.envs.registration:ENV_REGISTRY",
    "gymnasium": "gymnasium:registry",
}
"""The tasks of the packages that environments of ours play, by name."""


def test_the_page_has_the_names_that_users_look_for():
    names = [name for row in ROWS for name in re.split(r", (?![^(]*\))", row[0])]
    assert len(names) >= 100
    assert len(set(names)) == len(names)
    assert {how for _, how, _ in ROWS} == {"ours", "adapter", "endpoint", "no"}


@pytest.mark.parametrize("row", OURS, ids=[row[0] for row in OURS])
def test_a_row_of_ours_exists(row):
    environments, datasets = plugins(ENVIRONMENTS), plugins(DATASETS)
    known = {*environments, *datasets, *recipe_names(), *PROCESSORS}
    found = 0
    for span in re.findall(r"`([^`]+)`", row[2]):
        kind, _, task = span.partition(": ")
        if task and kind in TASKS:
            assert {kind} <= environments.keys() & datasets.keys()
            assert not find_spec(kind) or task in resolve(TASKS[kind]), f"{kind} has no {task}"
        elif task or ("." in span and span not in known):
            # A key of the environment before it, such as `mode: json_schema`.
            fields = environments[re.findall(r"`(\w+)`", row[2])[0]].config.model_fields
            assert kind.partition(".")[0] in fields, span
        else:
            assert span in known, f"there is no environment, dataset, processor or recipe {span}"
        found += 1
    assert found or "](" in row[2]


def test_what_adapters_need_is_an_extra_of_the_package():
    extras = " ".join(requires("rl-envs") or ())
    assert all(f"extra == '{name}'" in extras.replace('"', "'") for name in ("http", "mcp", "textarena", "gymnasium"))
