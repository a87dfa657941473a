"""`rl env check`: whether an environment behaves as rollouts need it to, and the text that its code looks for."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from rl_core.environments.conformance import Conformance, check
from rl_core.environments.instance import row_check_of
from rl_core.environments.rewards import RewardSum
from rl_core.errors import DataError
from rl_launch.commands.environments.judges import judge_findings, local_service
from rl_launch.commands.environments.source import GivenEnvironment

MAX_ATTEMPTS = 25
"""Maximum number of conversations in each pass of the check: five rows with five responses."""
MAX_SAMPLES = 10
"""Maximum number of conversations whose rewards are shown."""
_MAX_PLACES = 8

_MARKS = {"ok": "ok  ", "warned": "warn", "failed": "FAIL", "skipped": "-   "}
_OF_RE = frozenset({"compile", "finditer", "findall", "fullmatch", "match", "search", "split", "sub"})
_OF_TEXT = frozenset(
    {"endswith", "find", "index", "partition", "removeprefix", "removesuffix", "rpartition", "split", "startswith"}
)
_SIGNS = {ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in"}


def check_environment(given: GivenEnvironment, responses: Sequence[str] = ()) -> Conformance:
    """Check an environment on its first rows, with usual responses and those that the user gives.

    Raises:
        DataError: If no response can answer a row.
    """
    if (check_row := row_check_of(given.instance)) is not None:
        for row in given.rows:
            try:
                check_row(row.fields)
            except ValueError as error:
                text = f"{row.place}: the environment {given.instance.label} cannot score it: {error}"
                raise DataError(text) from None
    every = chain.from_iterable(row.attempts(responses) for row in given.rows)
    attempts = list(islice(every, MAX_ATTEMPTS + len(responses)))
    found = check(given.instance, attempts, given.tools, local_service(given.judges))
    by_judges = judge_findings(given, responses)
    if given.instance.environment == RewardSum(None, ()):
        # Only judges give rewards, so the environment itself gives none to all responses.
        return Conformance([*(each for each in found.findings if each.name != "rewards"), *by_judges], [])
    return replace(found, findings=[*found.findings, *by_judges])


def as_text(found: Conformance, sought: Sequence[str] = ()) -> str:
    """Return a line for every check, with the remedy below one that failed or a note below one that holds, and sample
    rewards.

    Args:
        found: Findings of the checks, and sample rewards.
        sought: Strings that the code of the environment looks for, shown below the remedy of the rewards.
    """
    lines = []
    for finding in found.findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.name:10}  {finding.said}")
        if finding.remedy:
            lines.append(f"{'':18}{'note' if finding.status == 'ok' else 'remedy'}: {finding.remedy}")
        if sought and finding.name == "rewards" and finding.remedy and finding.status != "failed":
            lines.append(f"{'':18}its code looks for:")
            lines += [f"{'':20}{each}" for each in sought]
    samples = found.samples[:MAX_SAMPLES]
    if samples:
        lines += ["", "rewards:"]
    for sample in samples:
        parts = ", ".join(f"{name} {value:g}" for name, value in sample.rewards.items() if name != "reward")
        named = f" ({parts})" if parts else ""
        turns = f", {sample.num_turns} turns" if sample.num_turns > 1 else ""
        total, response = f"{sample.rewards.get('reward', 0.0):g}", sample.attempt.conversation.completion
        lines.append(f"  {total:>8}{named}  {sample.attempt.place}{turns}: {response!r:.60}")
    return "\n".join(lines) + "\n"


def as_json(found: Conformance) -> dict[str, object]:
    """Return the findings and samples as plain values."""
    return {
        "schema": 1,
        "holds": found.holds,
        "checks": [
            {"name": each.name, "status": each.status, "said": each.said, "remedy": each.remedy}
            for each in found.findings
        ],
        "samples": [
            {
                "place": each.attempt.place,
                "response": each.attempt.conversation.completion,
                "rewards": dict(each.rewards),
                "num_turns": each.num_turns,
                "done": each.done,
            }
            for each in found.samples[:MAX_SAMPLES]
        ],
    }


def sought_texts(name: str) -> list[str]:
    """Return the regular expressions and constant strings that an environment's code compares with something, each with
    its place and the function or operator that takes it, in the order of the file. The list is empty for an environment
    that is not in a file, or whose file cannot be read. Its code is its definition and the definitions of the file that
    it refers to.

    Args:
        name: `file.py:NAME`.
    """
    file, colon, attribute = name.rpartition(":")
    path = Path(file).expanduser()
    if not colon or path.suffix != ".py":
        return []
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    texts = [each for statement in _used_by(tree, attribute) for each in _compared(statement)]
    texts.sort(key=lambda each: each[0])
    return [f"{path.name}:{line}: {how} {' '.join(text.splitlines())}" for line, text, how in texts[:_MAX_PLACES]]


def _used_by(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements of a module that define a name, and the definitions that they refer to."""
    defined: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) | ast.ClassDef(name=own):
                defined.setdefault(own, []).append(statement)
            case ast.Assign() | ast.AnnAssign():
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        defined.setdefault(node.id, []).append(statement)
    used: list[ast.stmt] = []
    waiting = list(defined.get(name, tree.body))
    while waiting:
        statement = waiting.pop()
        if statement not in used:
            used.append(statement)
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            waiting += [other for each in names for other in defined.get(each, ())]
    return used


def _compared(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each comparison, the text, and the function or operator that takes it."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=attribute), args=[first, *_]):
                known, how = _OF_RE, f"re.{attribute}"
            case ast.Call(func=ast.Attribute(attr=attribute), args=[first, *_]):
                known, how = _OF_TEXT, f".{attribute}"
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for operator, each in zip(ops, comparators, strict=True):
                    sign = _SIGNS.get(type(operator))
                    for text in (*_texts(left), *_texts(each)) if sign else ():
                        yield node.lineno, text, str(sign)
                continue
            case _:
                continue
        if attribute in known:
            yield from ((node.lineno, text, how) for text in _texts(first))


def _texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if text:
            yield text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _texts(left)
            yield from _texts(right)
        case ast.JoinedStr(values=items) | ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            for item in items:
                yield from _texts(item)
