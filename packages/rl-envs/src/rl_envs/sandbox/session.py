"""A Python session in a sandbox: variables are kept from call to call, as in a notebook."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Self

from rl_envs.sandbox.program import Limits, Program, read_frame, request_of, write_frame
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


MAX_JOURNAL_BYTES = 2**20
"""Maximum number of bytes of the code of a session that can be saved."""
MAX_JOURNAL_S = 60.0
"""Maximum number of seconds that the calls of a session may have taken if it is to be saved, as they run again."""
REPLAY_FACTOR = 10.0
"""A call that runs again may take this many times as long as it took, in addition to `MAX_JOURNAL_S`."""


class Session:
    """A running interpreter; its memory and its CPU count for all calls together.

    It keeps a journal of its calls, so that another sandbox can restore it (`save`, `restore`). The restored session
    equals this one as far as the code is deterministic: hashes of strings and `random` have the same seeds, while the
    clock, `os.urandom` and addresses in memory differ.

    Args:
        sandbox: Sandbox for it.
        limits: Limits of the session; the limits of the sandbox if unset. `wall_s` is for all calls together.
        seed: Seed of Python's `random`.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits | None = None, *, seed: int = 0) -> None:
        self._limits = limits or sandbox.limits
        self._seed = seed
        self._journal: list[tuple[str, float]] = []
        stack = contextlib.ExitStack()
        self._connection = stack.enter_context(sandbox.connect())
        self.close = stack.close
        self.ended = ""
        source = f"import random\nrandom.seed({int(seed)})\n{_REPL}"
        write_frame(self._connection, *request_of(Program(source, interactive=True), self._limits))

    @classmethod
    def restore(cls, sandbox: Sandbox, saved: bytes, limits: Limits | None = None) -> Self:
        """Start a session, and run the calls of a saved one in it.

        Args:
            sandbox: Sandbox for it.
            saved: Result of `save`.
            limits: Limits of the session, as for a new one.
        """
        state = json.loads(saved)
        session = cls(sandbox, limits, seed=state["seed"])
        for code, seconds in state["calls"]:
            session.execute(code, timeout_s=REPLAY_FACTOR * seconds + MAX_JOURNAL_S)
        if state["ended"]:
            session._end(state["ended"])
        # Seconds of the first run count, so that a session does not become too long because it is restored.
        session._journal = [(code, seconds) for code, seconds in state["calls"]]
        return session

    def save(self) -> bytes | None:
        """Return the calls so far as bytes; None if they are too long to run again (`MAX_JOURNAL_BYTES`,
        `MAX_JOURNAL_S`).
        """
        if sum(seconds for _, seconds in self._journal) > MAX_JOURNAL_S:
            return None
        calls = [] if self.ended else self._journal
        saved = json.dumps({"seed": self._seed, "calls": calls, "ended": self.ended}).encode()
        return saved if len(saved) <= MAX_JOURNAL_BYTES else None

    def execute(self, code: str, *, timeout_s: float) -> str:
        """Run code and return its output, with the value of a last expression, or its traceback.

        A session that has ended answers with the reason, which is in `ended`.
        """
        if self.ended:
            return self.ended
        begin = time.monotonic()
        try:
            write_frame(self._connection, {}, [json.dumps(code).encode() + b"\n"])
            answer = self._answer(begin + timeout_s)
            self._journal.append((code, round(time.monotonic() - begin, 3)))
            return answer
        except TimeoutError:
            self._end(f"the session was ended: a call took longer than {timeout_s:g} s")
        except ConnectionError:
            self._end("the session was ended")
        return self.ended

    def _answer(self, deadline: float) -> str:
        output = bytearray()
        while not output.endswith(b"\n"):
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            header, parts = read_frame(self._connection)
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
