"""Machines of E2B: `pip install e2b`, and its key in the environment variable E2B_API_KEY."""

from __future__ import annotations

import math
import os
from typing import Any

from rl_envs.sandbox.machines import GRACE_S, MachineRequest, run_with_files
from rl_envs.sandbox.program import Outcome
from rl_envs.sandbox.runner import SandboxUnavailable


class E2B:
    """Runs each program in a sandbox of E2B. `image` is a template, which sets processors and memory for all.

    Raises:
        SandboxUnavailable: If the package or the key is missing.
    """

    def __init__(self) -> None:
        try:
            import e2b
        except ImportError as error:
            raise SandboxUnavailable(f"sandbox.service e2b needs a package: pip install e2b ({error})") from None
        if not os.environ.get("E2B_API_KEY"):
            raise SandboxUnavailable("sandbox.service e2b needs a key in the environment variable E2B_API_KEY")
        self._e2b: Any = e2b

    def open(self, request: MachineRequest) -> Any:
        """Return a new sandbox, which E2B ends by itself if this process does not."""
        timeout_s = math.ceil(request.limits.wall_s + GRACE_S)
        network = request.has_network
        return self._e2b.Sandbox.create(request.image or None, timeout=timeout_s, allow_internet_access=network)

    def run(self, machine: Any, supervisor: str, job: bytes, timeout_s: float) -> bytes | Outcome:
        """Run the supervisor, by files."""

        def execute(command: str) -> int:
            try:
                code: int = machine.commands.run(command, timeout=timeout_s).exit_code
            except self._e2b.CommandExitException as error:
                code = error.exit_code
            return code

        files = machine.files
        return run_with_files(supervisor, job, files.write, execute, lambda path: files.read(path, format="bytes"))

    def close(self, machine: Any) -> None:
        """End a sandbox."""
        machine.kill()
