"""Every regular expression of the source takes linear time on long strings of its own making.

Each is collected from the syntax tree of its file, and pumped with strings made from its own parse tree: the bodies of
its repeats, beginnings that do not end, and single characters. On 50,000 characters a linear pattern takes milliseconds
of processor time and a quadratic one more than a second, so the limit between them does not depend on the machine.
"""

import ast
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]

import pytest

ROOT = Path(__file__).parents[1]
SHORT, LONG = 8_000, 50_000
SUSPICIOUS_S, LIMIT_S = 0.01, 0.5
SCANS = {"search", "sub", "subn", "findall", "finditer", "split"}
FUNCTIONS = SCANS | {"compile", "match", "fullmatch"}

BOUNDED = {
    "rl_core/config/dump.py": "backslashes that the user wrote into a config of at most 4 MiB",
    "rl_envs/gymnasium/environment.py": "the screen of a game, which no model writes",
    "rl_envs/math/": "answers of at most 3,000 characters, within two seconds of processor time",
}
"""Files and folders whose patterns may take longer, each with the reason why their input is short."""


@dataclass(frozen=True)
class Pattern:
    """A pattern in a file, and the methods that it is used by."""

    file: str
    line: int
    text: str
    flags: int
    methods: frozenset[str]


class NotConstant(Exception):
    """Raised for a pattern that is computed from more than constants of its file."""


def string(node: ast.expr, names: dict[str, ast.expr]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in names:
            return string(names[name], names)
        case ast.JoinedStr(values=parts):
            return "".join(string(part, names) for part in parts)
        case ast.FormattedValue(value=value):
            return string(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return string(left, names) + string(right, names)
        case ast.Attribute(value=inner, attr="pattern"):
            return string(inner, names)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="compile"), args=[inner, *_]):
            return string(inner, names)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="escape"), args=[inner]):
            return re.escape(string(inner, names))
        case _:
            raise NotConstant


def flags_of(call: ast.Call) -> int:
    given = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "flags")]
    names = {node.attr for each in given for node in ast.walk(each) if isinstance(node, ast.Attribute)}
    return sum(getattr(re, name) for name in names if isinstance(getattr(re, name, None), re.RegexFlag))


def patterns_of(path: Path) -> Iterator[Pattern | None]:
    """Yield the patterns of a file; None for each that is not a constant of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in FUNCTIONS:
            used.setdefault(node.value.id, set()).add(node.attr)
    compiled_as = {id(value): name for name, value in names.items()}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=function), args=[first, *rest]):
                if function not in FUNCTIONS:
                    continue
                methods = used.get(compiled_as.get(id(node), ""), {"search"}) if function == "compile" else {function}
                flags = flags_of(node) if function == "compile" or rest or node.keywords else 0
                try:
                    yield Pattern(
                        str(path).partition("/src/")[2], node.lineno, string(first, names), flags, frozenset(methods)
                    )
                except NotConstant:
                    yield None


@cache
def collected() -> tuple[Pattern | None, ...]:
    sources = sorted(ROOT.glob("packages/*/src/**/*.py"))
    return tuple(pattern for path in sources for pattern in patterns_of(path))


CANDIDATES = [*map(chr, range(32, 127)), "\n", "\t", "é", "\0"]


def of_set(items: list[tuple[object, object]]) -> str:
    """Return a character that a set matches, letters first."""
    compiled = _parser.SubPattern(_parser.State(), [(codes.IN, items)])
    matcher = re._compiler.compile(compiled)  # type: ignore[attr-defined]
    return next((each for each in ["a", "1", " ", *CANDIDATES] if matcher.match(each)), "")


def samples(tree: object) -> tuple[str, list[str]]:
    """Return a string that a parse tree matches, and strings to repeat: bodies of repeats, and beginnings."""
    whole, pumps = "", []
    for code, argument in tree:  # type: ignore[attr-defined]
        text = ""
        if code is codes.LITERAL:
            text = chr(argument)
        elif code is codes.NOT_LITERAL:
            text = next(each for each in CANDIDATES if ord(each) != argument)
        elif code is codes.ANY:
            text = "a"
        elif code is codes.IN:
            text = of_set(argument)
        elif code is codes.BRANCH:
            branches = [samples(branch) for branch in argument[1]]
            text = branches[0][0]
            pumps += [pump for each, inner in branches for pump in (each, *inner)]
        elif code is codes.SUBPATTERN:
            text, inner = samples(argument[-1])
            pumps += inner
        elif code is codes.ATOMIC_GROUP:
            text, inner = samples(argument)
            pumps += inner
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, _, body = argument
            body_text, inner = samples(body)
            text = body_text * max(least, 1)
            pumps += [body_text, whole + body_text, *inner]
        whole += text
        pumps.append(whole)
    return whole, pumps


def strings_of(pattern: Pattern) -> Iterator[tuple[str, str, str]]:
    """Yield triples of a beginning, what is repeated, and an end."""
    whole, pumps = samples(_parser.parse(pattern.text, pattern.flags))
    repeated = [each for each in dict.fromkeys([*pumps, whole, " ", "a", "1", "\n", "("]) if each]
    for pump in repeated:
        for before in dict.fromkeys(("", whole[:1])):
            for after in ("", "\0"):
                yield before, pump, after


class OutOfTime(Exception):
    """Raised in a pattern that takes too long."""


def stop(*_: object) -> None:
    raise OutOfTime


def seconds(pattern: Pattern, text: str) -> float:
    """Return the processor time of all methods, at most about four times the limit."""
    compiled, start = re.compile(pattern.text, pattern.flags), time.process_time()
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 4 * LIMIT_S)
    try:
        for method in {"search" if each in SCANS | {"compile"} else each for each in pattern.methods}:
            if method == "search":
                compiled.sub("", text)
            else:
                getattr(compiled, method)(text)
    except OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    return time.process_time() - start


def worst(pattern: Pattern) -> tuple[float, str]:
    """Return the processor time for a long string, and the beginning of that string; 0 if nothing is suspicious."""
    for before, pump, after in strings_of(pattern):
        short = before + pump * (SHORT // len(pump)) + after
        if seconds(pattern, short) > SUSPICIOUS_S:
            found = seconds(pattern, before + pump * (LONG // len(pump)) + after)
            if found > LIMIT_S:
                return found, short[:60]
    return 0.0, ""


def test_no_pattern_takes_quadratic_time():
    slow = {}
    for pattern in dict.fromkeys(each for each in collected() if each is not None):
        if not pattern.file.startswith(tuple(BOUNDED)):
            found, text = worst(pattern)
            if found:
                slow[f"{pattern.file}:{pattern.line}"] = f"{pattern.text!r} takes {found:.1f} s for {text!r}..."
    assert slow == {}


def test_nearly_all_patterns_are_collected():
    unknown = sum(each is None for each in collected())
    assert len(collected()) > 200
    assert unknown < len(collected()) / 8


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (r"a*a*b", "match"),
        (r"(\w+)\.?\w*!", "fullmatch"),
        (r"\$\{(\w+)(?::-([^}]*))?\}", "findall"),
        (r"(a|a)*b", "match"),
    ],
)
def test_a_pattern_that_is_not_linear_is_found(text, method):
    assert worst(Pattern("a.py", 1, text, 0, frozenset({method})))[0] > LIMIT_S


@pytest.mark.parametrize("text", [r"(?<!\s)\s+$", r"<a>((?:(?!<a>).)*?)</a>", r"\w+(?:\.\w*)?!"])
def test_a_linear_pattern_is_not_found(text):
    assert worst(Pattern("a.py", 1, text, 0, frozenset({"match" if text[0] == "\\" else "search"})))[0] == 0


def test_reasons_are_of_patterns_that_exist():
    assert all(any(each is not None and each.file.startswith(place) for each in collected()) for place in BOUNDED)
