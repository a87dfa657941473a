"""The interface of every place where programs run, and its errors."""

from __future__ import annotations

from typing import Protocol

from rl_core.errors import InfrastructureFailed, RLError
from rl_envs.sandbox.program import Cancellation, Limits, Outcome, Program


class SandboxUnavailable(RLError):
    """Raised if the sandbox of the settings cannot run programs here; its message has the reason and the remedy."""


class SandboxFailed(InfrastructureFailed):
    """Raised if a program could not be run for a reason outside the program."""


class Runner(Protocol):
    """Runs programs: a sandbox on this machine, or on another."""

    @property
    def place(self) -> str:
        """Description of the place if its programs do not run on this machine; empty if they do, so that a program
        can have a relay to one address.
        """

    def run(self, program: Program, limits: Limits | None = None, cancellation: Cancellation | None = None) -> Outcome:
        """Run a program to its end, or until it is cancelled."""

    def close(self) -> None:
        """End what runs."""
