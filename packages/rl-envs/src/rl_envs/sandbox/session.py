"""A Python session in a sandbox: variables live from call to call, as in a notebook."""

from __future__ import annotations

import contextlib
import json
import time
from types import TracebackType
from typing import Self

from rl_envs.sandbox import frames
from rl_envs.sandbox.program import Limits, Program, request_of
from rl_envs.sandbox.sandbox import Sandbox, outcome_of

_REPL = """
import ast, io, json, os, sys, traceback
calls = os.fdopen(os.dup(0), "rb")
answers = os.fdopen(os.dup(1), "wb")
nothing = os.open("/dev/null", os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(nothing, 1)
sys.stdin = io.StringIO()
space = {"__name__": "__main__"}
def run(code):
    tree = ast.parse(code, "<call>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<call>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<call>", "eval"), space)
        if value is not None:
            print(repr(value))
for line in calls:
    sys.stdout = sys.stderr = output = io.StringIO()
    try:
        run(json.loads(line))
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        traceback.print_exception(type(error), error, frames, file=output)
    answers.write(json.dumps(output.getvalue()).encode() + b"\\n")
    answers.flush()
"""


class Session:
    """A running interpreter; its memory and its CPU count for all calls together.

    Args:
        sandbox: Where it runs.
        limits: Limits of the session; those of the sandbox if unset. `wall_s` is for all calls together.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits | None = None) -> None:
        self._limits = limits or sandbox.limits
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(sandbox.connect())
        self.ended = ""
        frames.write(self._connection, *request_of(Program(_REPL, interactive=True), self._limits))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def execute(self, code: str, *, timeout_s: float) -> str:
        """Run code and return its output, with the value of a last expression, or its traceback.

        A session that has ended (`ended` says why) answers with that.
        """
        if self.ended:
            return self.ended
        deadline = time.monotonic() + timeout_s
        try:
            frames.write(self._connection, {}, [json.dumps(code).encode() + b"\n"])
            return self._answer(deadline)
        except TimeoutError:
            self._end(f"the session was ended: a call took longer than {timeout_s:g} s")
        except ConnectionError:
            self._end("the session was ended")
        return self.ended

    def close(self) -> None:
        """End the interpreter."""
        self._stack.close()

    def _answer(self, deadline: float) -> str:
        output = bytearray()
        while not output.endswith(b"\n"):
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            header, parts = frames.read(self._connection)
            if not header.get("output"):
                outcome = outcome_of(header, parts)
                self._end(f"the session was ended: {outcome.describe(self._limits)}")
                return self.ended
            output += parts[0]
        try:
            answer = json.loads(output)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, str):
            self._end("the session was ended: the code wrote to its descriptors")
            return self.ended
        return answer

    def _end(self, reason: str) -> None:
        self.ended = reason
        self.close()
