"""Small files that stand for very much: refused in one message. Read out, most of them would never end."""

from pathlib import Path

import pytest

from rl_core.config import load
from rl_core.config.load import interpolate
from rl_core.errors import ConfigError

DEEP = "lists and mappings are nested more than 64 levels deep"
MANY = "more than 50,000 values, each alias (`*name`) written out"


def doubled(levels: int, of: str) -> str:
    """Lines whose last one stands for `2 ** levels` values."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} {of.replace('?', f'*a{n - 1}')}" for n in range(1, levels))]
    return "\n".join(lines)


def indented(levels: int) -> str:
    return "".join(f"{' ' * level}b:\n" for level in range(levels))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(doubled(60, "[?, ?]"), f"a.yaml:1: {MANY}", id="aliases in lists"),
        pytest.param(doubled(60, "{b: ?, c: ?}"), f"a.yaml:1: {MANY}", id="aliases in mappings"),
        pytest.param(doubled(100, "[?]"), f"a.yaml:1: {DEEP}", id="aliases one in another"),
        pytest.param("a: [" + "1, " * 60_000 + "]", f"a.yaml:1: {MANY}", id="a long list"),
        pytest.param("a: " + "[" * 100_000, f"a.yaml:1: not valid YAML: {DEEP}", id="lists"),
        pytest.param("a: " + "{b: " * 5000, f"a.yaml:1: not valid YAML: {DEEP}", id="mappings"),
        pytest.param(indented(500), f"a.yaml:64: not valid YAML: {DEEP}", id="sections"),
    ],
)
def test_a_small_file_that_stands_for_very_much_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load("a.yaml")
    assert str(refused.value) == message


def test_a_value_of_the_command_line_is_bounded_too(folder: Path) -> None:
    (folder / "a.yaml").write_text("b: 1")
    with pytest.raises(ConfigError, match=DEEP):
        load("a.yaml", ["b=" + "[" * 2000 + "]" * 2000])


def test_a_file_that_many_inherit_from_is_read_once(folder: Path) -> None:
    for level in range(30):
        (folder / f"b{level}.yaml").write_text(f"defaults: [{', '.join([f'b{level + 1}'] * 8)}]\n")
    (folder / "b30.yaml").write_text("a: 1\n")
    raw = load("b0.yaml")
    assert (raw.select("a"), len(raw.files)) == (1, 31)


@pytest.mark.parametrize(
    "name", [pytest.param("{}/up/b.yaml", id="absolute"), pytest.param("../up/b.yaml", id="folder above")]
)
def test_files_of_any_folder_may_be_inherited_from(folder: Path, name: str) -> None:
    for each in ("up", "down"):
        (folder / each).mkdir()
    (folder / "up" / "b.yaml").write_text("a: 1\n")
    (folder / "down" / "a.yaml").write_text(f"defaults: {name.format(folder)}\n")
    assert load("down/a.yaml").select("a") == 1


def test_a_file_that_is_not_a_recipe_shows_nothing_of_its_text(folder: Path) -> None:
    (folder / "secret.yaml").write_text("sk-live-12345\n")
    (folder / "a.yaml").write_text("defaults: secret.yaml\n")
    with pytest.raises(ConfigError) as refused:
        load("a.yaml")
    assert str(refused.value) == "secret.yaml:1: the file must hold `key: value` lines"


def nested(levels: int, reference: str) -> dict[str, object]:
    return {"k": {"a0": "x", **{f"a{n}": reference.replace("?", f"a{n - 1}") * 2 for n in range(1, levels)}}}


@pytest.mark.parametrize("reference", ["${k.?}", "${.?}", "${..k.?}"])
def test_interpolations_that_double_at_each_level_are_refused(reference: str) -> None:
    tree = nested(40, reference)
    values, wrong = interpolate(tree, tree)
    assert values["k"]["a4"] == "x" * 16
    assert min(int(str(path[-1])[1:]) for path in wrong) == 9
    written = reference.replace("?", "a8") * 2
    assert wrong["k", "a9"] == f"{written!r} leads to more than 1,000 interpolations; write the value"


def test_a_chain_of_interpolations_is_resolved() -> None:
    tree = {"a0": "x", **{f"a{n}": f"${{a{n - 1}}}" for n in range(1, 20)}}
    values, wrong = interpolate(tree, tree)
    assert (values["a19"], wrong) == ("x", {})
