"""Foreign files that stand for very much, or are not what they seem: refused in one message, and nothing of them runs.

Read out, most of them would never end, so these tests need no clock.
"""

import copy

import pytest
from foreign_files import NEMO_RL, TRL_GRPO, written

from rl_core.config.tree import leaves
from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config

DEEP = "nested more than 64 levels deep"
MANY = "more than 50,000 keys and values"
LONG = "a number has more than 300 digits"
LARGE = "which is too large for a config or a script"
HALF = r"half of a surrogate pair (\ud800)"
COSTLY = "s of processor time or 512 MiB of memory"
NINES = "9" * 5000
TRAIN = "from trl import SFTConfig, SFTTrainer\n{}\nSFTTrainer(model=x, args=SFTConfig(max_steps=1))\n"


def doubled(levels: int, line: str, first: str) -> str:
    return "\n".join([first, *(line.format(n, n - 1) for n in range(1, levels))])


FILES = {
    "aliases in lists": (".yaml", doubled(60, "a{0}: &a{0} [*a{1}, *a{1}]", "a0: &a0 [x]"), f".yaml:16: {MANY}"),
    "aliases in mappings": (".yaml", doubled(60, "a{0}: &a{0} {{b: *a{1}, c: *a{1}}}", "a0: &a0 {x: 1}"), MANY),
    "merge keys": (".yaml", doubled(60, "a{0}: &a{0}\n  <<: [*a{1}, *a{1}]", "a0: &a0 {x: 1}"), MANY),
    "an alias in itself": (".yaml", "a: 1\nb: &b\n  <<: *b", ".yaml:3: an alias (`*name`) inside its own anchor"),
    "depth": (".yaml", "a: " + "[" * 5000 + "]" * 5000, f".yaml:1: lists and mappings are {DEEP}"),
    "keys": (".yaml", "".join(f"k{n}: {n}\n" for n in range(60_000)), f".yaml:25000: {MANY}"),
    "a scalar": (".yaml", "a: " + "x" * (5 << 20), LARGE),
    "digits": (".yaml", f"a: 1\nb: {NINES}", f".yaml:2: {LONG}"),
    "digits of base 2": (".yaml", "a: 0b" + "1" * 20_000, f"a: {LONG}"),
    "tag": (".yaml", "a: !!python/object/apply:os.abort []", ".yaml:1: not valid YAML: could not determine a constr"),
    "set": (".yaml", "a: !!set {x, y}", "a: set is not supported"),
    "NUL": (".yaml", "a: 1\nb: \0", ".yaml:2: not valid YAML: special characters are not allowed"),
    "surrogate": (".yaml", 'a: 1\nb: "\\ud800"', f".yaml:2: a string has {HALF}"),
    "latin-1": (".yaml", b"a: \xe9", "not a text file in UTF-8"),
    "interpolations": (".yaml", doubled(60, "a{0}: ${{a{1}}}${{a{1}}}", "a0: x"), "leads to more than 1,000 inter"),
    "a chain": (".yaml", doubled(2000, "a{0}: ${{a{1}}}", "a0: x"), COSTLY),
    "an interpolation in itself": (".yaml", "a: " + "${add:" * 3000 + "1" + "}" * 3000, "too many interpolations"),
    "a product of a string": (".yaml", "a: ${mul:99999999999,xx}", "only numbers can be computed with"),
    "powers": (".yaml", doubled(40, "a{0}: ${{mul:${{a{1}}},${{a{1}}}}}", "a0: 9999999"), "cannot be resolved"),
    "JSON depth": (".json", '{"a":' * 5000 + "1" + "}" * 5000, DEEP),
    "JSON digits": (".json", f'{{"a": {NINES}}}', LONG),
    "JSON surrogate": (".json", '{"a": "\\ud800"}', f"a: a string has {HALF}"),
    "JSON keys": (".json", "{" + ",".join(f'"k{n}": 1' for n in range(60_000)) + "}", MANY),
    "TOML depth": (".toml", "a = " + "[" * 5000 + "]" * 5000, DEEP),
    "TOML dots": (".toml", ".".join("a" * 3000) + " = 1", DEEP),
    "TOML digits": (".toml", f"a = {NINES}", LONG),
    "TOML date": (".toml", "a = 2001-01-01", "a: date is not supported"),
    "a tower of minus signs": (".py", "x = " + "-" * 50_000 + "1", "nested too deeply"),
    "a sum": (".py", "x = " + "1+" * 50_000 + "1", "nested too deeply"),
    "digits in a script": (".py", f"\nx = {NINES}", "line 2: a number has more than"),
    "a NUL in a script": (".py", "x = 1\0", "is not valid Python: line 1: source code string cannot contain null"),
    "a large script": (".py", "x = 1\n" * 200_000, LARGE),
    "a long string": (".py", TRAIN.format("x = 'x' * 10**10"), COSTLY),
    "a wide field": (".py", TRAIN.format("x = f'{1:>9999999999}'"), COSTLY),
    "strings that double": (".py", TRAIN.format("x = 'xx'\n" + "x = x + x\n" * 40), COSTLY),
    "lists that double": (".py", TRAIN.format("x = [1]\n" + "x = [x, x]\n" * 40), COSTLY),
    "loops in loops": (
        ".py",
        TRAIN.format("".join(f"{' ' * n}for y in (1, 2, 3, 4, 5, 6, 7, 8):\n" for n in range(12)) + f"{' ' * 12}x = y"),
        COSTLY,
    ),
    "variables that double": (".sh", "A=xx\n" + "A=$A$A\n" * 40 + "python m a.b=$A", "hold more than 524,288 bytes"),
    "a large shell script": (".sh", "python m a.b=" + "x" * 600_000, LARGE),
}
"""Suffix, content and a part of the message, by name."""


@pytest.mark.parametrize(("suffix", "content", "says"), FILES.values(), ids=FILES)
def test_a_hostile_file_is_refused_in_one_message(tmp_path, suffix, content, says):
    path = tmp_path / f"theirs{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        import_config(path, "trl", algorithm="" if suffix == ".py" else "grpo")
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()[0]) < 500


def test_towers_of_powers_are_not_computed(tmp_path):
    """Nothing interrupts Python while it computes them."""
    path = tmp_path / "theirs.py"
    path.write_text(TRAIN.format("x = 'm'\ny = 9**9**9\nz = [1 << 9**9, -9**9**9]"))
    assert import_config(path, "trl").recipe["policy"]["model_name"] == "m"


WRONG = (None, -1, "x y", [], [1, [2]], {}, {"a": {"b": 1}}, 10**290, float("nan"), True, "x" * 5000)
"""Values of other types and sizes than most keys take."""


@pytest.mark.parametrize(("system", "values"), [("nemo-rl", NEMO_RL), ("trl", TRL_GRPO)])
def test_a_value_of_another_type_is_converted_or_refused(tmp_path, system, values):
    """Every third key in turn gets one of the wrong values, a different one from key to key."""
    for place, path in enumerate([*leaves(values)][::3]):
        changed = copy.deepcopy(values)
        at = changed
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = WRONG[place % len(WRONG)]
        try:
            import_config(written(tmp_path, changed), system)
        except ConfigError as error:
            assert str(error)  # noqa: PT017 - either end is right, and any other error fails the test


def test_a_section_with_a_value_is_named(tmp_path):
    with pytest.raises(ConfigError, match="policy is a section here, and the file gives it the value 3"):
        import_config(written(tmp_path, {**NEMO_RL, "policy": 3}), "nemo-rl")
