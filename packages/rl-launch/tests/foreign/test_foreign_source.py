"""Interpolations of OmegaConf are computed."""

import pytest

from rl_core.errors import ConfigError
from rl_launch.foreign.source import interpolated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${a.b}", 3),
        ("${..b}", 3),
        ("${mul:${a.b}, 4}", 12),
        ("${mul:2, ${mul:${.tp}, 5}}", 20),
        ("${div:${a.b}, 2}", 1.5),
        ("${div:12, ${a.b}}", 4),
        ("${max:${a.b}, 9}", 9),
        ("x-${a.b}-y", "x-3-y"),
        ("${oc.env:HOME}/data", "${oc.env:HOME}/data"),
        ("${oc.env:PORT,80}", "${oc.env:PORT,80}"),
        ("${oc.env:NAME,null}", "${oc.env:NAME,null}"),
        ("${oc.env:NAME,''}", "${oc.env:NAME,''}"),
        ("${oc.env:NAME,'a,b'}", "${oc.env:NAME,'a,b'}"),
        ("${oc.select:a.gone, 7}", 7),
        ("${oc.select:a.b, 7}", 3),
        ("${a.list}", [1, 3]),
        ("${a.chain}", 3),
        ("${names.${a.key}}", "found"),
    ],
)
def test_values(text, value):
    tree = {
        "a": {"b": 3, "tp": 2, "list": [1, "${a.b}"], "chain": "${.b}", "key": "one", "inner": {"x": text, "tp": 2}},
        "names": {"one": "found"},
    }
    assert interpolated(tree, "file")["a"]["inner"]["x"] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${gone.key}", "gone.key"),
        ("${x}", "leads back to itself"),
        ("${times:2}", "'times'"),
        ("${mul:a, 2}", "only numbers"),
        ("${open", "not a valid interpolation"),
    ],
)
def test_what_cannot_be_computed_is_named(text, words):
    with pytest.raises(ConfigError, match="x: ") as refused:
        interpolated({"x": text}, "file")
    assert words in str(refused.value)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as refused:
        interpolated({"x": "${gone}", "y": {"z": "${gone.too}"}}, "file")
    assert "x: " in str(refused.value)
    assert "y.z: " in str(refused.value)
