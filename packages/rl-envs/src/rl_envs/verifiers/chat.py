"""The harness `rl_chat`: verifiers' chat with tools, in the process of the rollout.

Verifiers' `null` starts the same program in another Python for each rollout, which takes a second of processor time.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

# The client imports these at its first call, which takes a second in each rollout unless they are imported before.
import httpcore  # noqa: F401
import openai.resources as openai_resources  # noqa: F401
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

_PROGRAM = compile(CHAT_PROGRAM_SOURCE, "verifiers chat program", "exec")


class ChatHarness(NullHarness):
    """Verifiers' `null` without a Python of its own."""

    async def setup(self, runtime: Any) -> None:
        """Do nothing: the program uses the packages of verifiers."""

    async def launch(self, ctx: Any, trace: Any, runtime: Any, *args: Any, **kwargs: Any) -> ProgramResult:
        """Run the program here."""
        return await super().launch(ctx, trace, _InThisProcess(runtime), *args, **kwargs)


class _InThisProcess:
    """What the launch of a program needs of a runtime.

    Args:
        runtime: The runtime, a local one, which has the program's files.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.write = runtime.write

    async def prepare_uv_script(self, *_: Any, **__: Any) -> list[str]:
        """Return no command to begin with."""
        return []

    async def run_program(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run the program with these arguments."""
        program: dict[str, Any] = {"__name__": "chat"}
        exec(_PROGRAM, program)
        before, sys.argv = sys.argv, ["chat", *argv]
        try:
            arguments = program["parse_args"]()
        finally:
            sys.argv = before
        if arguments.initial_messages_file:
            arguments.initial_messages_file = str(self._runtime.workdir / arguments.initial_messages_file)
        program["parse_args"] = lambda: arguments
        os.environ |= env
        try:
            await program["main"]()
        except SystemExit as error:
            return ProgramResult(error.code if isinstance(error.code, int) else 1, "", traceback.format_exc())
        except Exception:  # noqa: BLE001 - verifiers reads how a program has ended
            return ProgramResult(1, "", traceback.format_exc())
        return ProgramResult(0, "", "")
