"""Programs that call a response's program in the sandbox, and report to the environment.

What is right stays outside: of calls, the harness reports the results. Assertions run next to the program, which could
tamper with them; a program that merely ends early has not passed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rl_envs.sandbox.interpreter import MAX_DIGITS
from rl_envs.sandbox.program import Outcome, Program

SOLUTION = "solution.py"
"""Name of the response's program next to the harness."""

_START = """
import json, os, sys
with open("solution.py", encoding="utf-8", errors="surrogateescape") as file:
    source = file.read()
task = json.loads(sys.stdin.readline())
report = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
os.dup2(2, 1)  # output of the program must not reach the report
sys.setrecursionlimit(50_000)
space = {"__name__": "solution"}
exec("from typing import *\\nimport collections, functools, heapq, itertools, math, re, string, bisect, random\\n"
     "from collections import *\\nfrom functools import *\\nfrom heapq import *\\nfrom itertools import *\\n"
     "from bisect import *\\nfrom math import *", space)
def plain(value):
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:
            return sorted(value, key=repr)
    raise TypeError(type(value).__name__)
def tell(index, **fields):
    try:
        text = json.dumps({"index": index, **fields}, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        text = json.dumps({"index": index, "error": f"its result is not plain data: {error}"})
    print(task["mark"], text, file=report, flush=True)
def error_of(error):
    return f"{type(error).__name__}: {error}"[:300]
try:
    exec(compile(source, "solution.py", "exec"), space)
except BaseException as error:
    tell(-1, error=error_of(error))
    raise SystemExit(0)
"""

_CALLS = """
def find(name):
    if name in space:
        return space[name]
    if "Solution" in space:
        return getattr(space["Solution"](), name)
    raise NameError(f"there is no function {name}")
for index, arguments in enumerate(task["arguments"]):
    try:
        result = find(task["function"])(*arguments)
    except BaseException as error:
        tell(index, error=error_of(error))
    else:
        tell(index, result=result)
"""

_ASSERTIONS = """
for index, text in enumerate(task["texts"]):
    try:
        exec(compile(text, f"test {index + 1}", "exec"), space)
    except BaseException as error:
        tell(index, error=error_of(error))
    else:
        tell(index, result=True)
"""


def calls(solution: str, function: str, arguments: Sequence[Sequence[Any]]) -> tuple[Program, str]:
    """Return a program that calls a function of the solution, and the mark of its reports."""
    return _program(solution, _CALLS, {"function": function, "arguments": list(arguments)})


def assertions(solution: str, texts: Sequence[str]) -> tuple[Program, str]:
    """Return a program that runs tests after the solution, and the mark of its reports."""
    return _program(solution, _ASSERTIONS, {"texts": list(texts)})


def reports(outcome: Outcome, mark: str) -> dict[int, dict[str, Any]]:
    """Return the reports by the index of their test; -1 is a solution that could not be loaded."""
    found: dict[int, dict[str, Any]] = {}
    for line in outcome.stdout.decode(errors="replace").splitlines():
        head, _, text = line.partition(" ")
        if head != mark:
            continue
        try:
            report = json.loads(text, parse_int=whole_number)
        except (ValueError, RecursionError):  # cut off at the limit of output, forged, or an integer that is too long
            continue
        if isinstance(report, dict) and isinstance(report.get("index"), int):
            found[report["index"]] = report
    return found


def whole_number(digits: str) -> int:
    """Return the integer of a number in JSON; `int` refuses more than 4,300 digits.

    Raises:
        ValueError: If it has more than 100,000 digits.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number has {len(digits)} digits; the limit is {MAX_DIGITS}")
    return int(Decimal(digits))


def _program(solution: str, body: str, task: dict[str, Any]) -> tuple[Program, str]:
    mark = secrets.token_hex(8)
    stdin = json.dumps({**task, "mark": mark}).encode() + b"\n"
    # Half of a surrogate pair makes a file that Python refuses, as it should be.
    files = {SOLUTION: solution.encode("utf-8", "surrogatepass")}
    return Program(_START + body, stdin=stdin, files=files), mark
