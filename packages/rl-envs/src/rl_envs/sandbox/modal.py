"""Machines of Modal: `pip install modal`, and its token in MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."""

from __future__ import annotations

import math
import threading
from typing import Any

from rl_envs.sandbox.machines import GRACE_S, MachineRequest, run_with_files
from rl_envs.sandbox.program import Outcome
from rl_envs.sandbox.runner import SandboxUnavailable

APP = "rl-sandboxes"
"""Name of the app of all sandboxes, which is created when it is missing."""


class Modal:
    """Runs each program in a sandbox of Modal. `image` is an image of a registry; Debian with Python is the default.

    Raises:
        SandboxUnavailable: If the package is missing.
    """

    def __init__(self) -> None:
        try:
            import modal
        except ImportError as error:
            raise SandboxUnavailable(f"sandbox.service modal needs a package: pip install modal ({error})") from None
        self._modal: Any = modal
        self._app: Any = None
        self._lock = threading.Lock()

    def open(self, request: MachineRequest) -> Any:
        """Return a new sandbox, which Modal ends by itself if this process does not."""
        modal, limits = self._modal, request.limits
        with self._lock:
            self._app = self._app or modal.App.lookup(APP, create_if_missing=True)
        image = modal.Image.from_registry(request.image) if request.image else modal.Image.debian_slim()
        memory = limits.memory_mib + limits.scratch_mib
        return modal.Sandbox.create(
            *("sleep", "infinity"),
            app=self._app,
            image=image,
            timeout=math.ceil(limits.wall_s + GRACE_S),
            memory=(memory, memory),
            block_network=not request.has_network,
        )

    def run(self, machine: Any, supervisor: str, job: bytes, timeout_s: float) -> bytes | Outcome:
        """Run the supervisor, by files."""

        def execute(command: str) -> int | None:
            code: int | None = machine.exec("sh", "-c", command, timeout=math.ceil(timeout_s)).wait()
            return code

        files = machine.filesystem
        return run_with_files(
            supervisor, job, lambda path, data: files.write_bytes(data, path), execute, files.read_bytes
        )

    def close(self, machine: Any) -> None:
        """End a sandbox."""
        machine.terminate()
