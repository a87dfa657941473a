"""Small files that stand for very much: refused in one message. Read out, most of them would never end."""

from pathlib import Path

import pytest

from rl_core.config import load
from rl_core.config.load import interpolate
from rl_core.errors import ConfigError

DEEP = "lists and mappings are nested more than 64 levels deep"
MANY = "more than 50,000 keys and values, each alias (`*name`) written out"


LARGE = "which is too large for a config or a script"
LONG = "a number has more than 300 digits; quote it to pass it as a string"
HALF = r"half of a surrogate pair (\ud800); write the character itself"


def doubled(levels: int, of: str) -> str:
    """Lines whose last one stands for `2 ** levels` values."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} {of.replace('?', f'*a{n - 1}')}" for n in range(1, levels))]
    return "\n".join(lines)


def indented(levels: int) -> str:
    return "".join(f"{' ' * level}b:\n" for level in range(levels))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(doubled(60, "[?, ?]"), f"a.yaml:15: {MANY}", id="aliases in lists"),
        pytest.param(doubled(60, "{b: ?, c: ?}"), f"a.yaml:15: {MANY}", id="aliases in mappings"),
        pytest.param(doubled(100, "[?]"), f"a.yaml:64: {DEEP}", id="aliases one in another"),
        pytest.param("a: [" + "1, " * 60_000 + "]", f"a.yaml:1: {MANY}", id="a long list"),
        pytest.param("a: " + "[" * 100_000, f"a.yaml:1: {DEEP}", id="lists"),
        pytest.param("a: " + "{b: " * 5000, f"a.yaml:1: {DEEP}", id="mappings"),
        pytest.param(indented(500), f"a.yaml:64: {DEEP}", id="sections"),
        pytest.param("".join(f"k{n}: 1\n" for n in range(60_000)), f"a.yaml:25000: {MANY}", id="keys"),
        pytest.param("a: " + "x" * (4 << 20), f"a.yaml: larger than 4,194,304 bytes, {LARGE}", id="a scalar"),
        pytest.param("#" * (4 << 20) + "\na: 1", f"a.yaml: larger than 4,194,304 bytes, {LARGE}", id="a comment"),
        pytest.param("b: 1\na: -" + "9" * 5000, f"a.yaml:2: {LONG}", id="digits"),
        pytest.param("b: 1\na: 0x" + "f" * 5000, f"a.yaml:2: {LONG}", id="digits of base 16"),
        pytest.param("b: 1\na: 1" + "_1" * 5000, f"a.yaml:2: {LONG}", id="digits with underscores"),
        pytest.param("b: 1\na: 1." + "5" * 5000, f"a.yaml:2: {LONG}", id="decimal places"),
        pytest.param('b: 1\na: "\\ud800"', f"a.yaml:2: a string has {HALF}", id="a surrogate"),
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("b=" + "9" * 5000, LONG, id="digits"),
        pytest.param("b=[1, 0x" + "f" * 5000 + "]", LONG, id="digits in a list"),
        pytest.param("b[" + "9" * 5000 + "]=1", "is not a key: write names joined by dots", id="an index"),
        pytest.param(".".join("b" * 5000) + "=1", "is not a key: it has more than 64 levels", id="levels"),
        pytest.param("b=${c[" + "9" * 5000 + "]}", "99...'", id="an interpolation"),
    ],
)
def test_an_override_that_is_far_too_long_is_refused_and_not_repeated(
    folder: Path, override: str, message: str
) -> None:
    (folder / "a.yaml").write_text("b: 1\nc: [1]")
    with pytest.raises(ConfigError) as refused:
        load("a.yaml", [override]).select("b")
    assert message in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_chain_of_files_that_inherit_is_bounded(folder: Path) -> None:
    for level in range(2000):
        (folder / f"b{level}.yaml").write_text(f"defaults: b{level + 1}.yaml\n")
    with pytest.raises(ConfigError, match=r"b64\.yaml: `defaults` form a chain of more than 64 files"):
        load("b0.yaml")


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
