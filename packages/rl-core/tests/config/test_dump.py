"""A dumped config loads back to an equal one, whatever is in it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.config import Config, Resolved, assemble, load, resolve, to_yaml

AWKWARD = ["1e5", "no", "null", "~", "", "???", "true", "007", "0x1", "12:30:00", "2026-01-01", "${a}", r"\${a}", "$"]
AWKWARD += [
    "a: b",
    "# c",
    "- d",
    "'",
    '"',
    "\n",
    "a\nb\n",
    " a\n b",
    "\t",
    "{% x %}",
    "[",
    "=",
    "<<",
    "é",
    "\x85",
    "\x07",
]
TEXT = st.sampled_from(AWKWARD) | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(bool), inner, max_size=3)
)


class Values(Config):
    free: dict[str, Any] = {}
    text: str = ""
    texts: list[str] = []
    maybe: str | None = None
    number: float = 0.0
    count: int = 0
    flag: bool = False


ROOT = assemble("Root", {"values": Values})


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, also where 1 == True == 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(free=st.dictionaries(TEXT.filter(bool), TREE, max_size=4), data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dump_then_load_gives_an_equal_config(tmp_path: Path, free: dict[str, Any], data: st.DataObject) -> None:
    values = Values(
        free=free,
        text=data.draw(TEXT),
        texts=data.draw(st.lists(TEXT, max_size=3)),
        maybe=data.draw(st.none() | TEXT),
        number=data.draw(st.floats(allow_nan=False)),
        count=data.draw(st.integers()),
        flag=data.draw(st.booleans()),
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(ROOT(values=values)), encoding="utf-8", newline="")
    loaded = resolve(load(path), ROOT).config.model_dump()["values"]
    assert same(loaded, values.model_dump())


def test_the_dump_holds_every_default_in_order(run: Callable[..., Resolved[Any]], root: type[Config]) -> None:
    config = run(overrides=["policy.attention=flash", "policy.generation.stop_token_ids=[1]"]).config
    text = to_yaml(config)
    assert list(yaml.safe_load(text)) == list(root.model_fields)
    assert yaml.safe_load(text)["policy"]["attention"] == "flash"
    assert run(text).config == config


@pytest.mark.parametrize("text", AWKWARD)
def test_every_yaml_reader_takes_dumped_text_for_text(text: str) -> None:
    dumped = yaml.safe_load(to_yaml(ROOT(values=Values(text=text))))["values"]["text"]
    assert dumped.replace("\\", "") == text.replace("\\", "")
