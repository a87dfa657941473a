"""Requests of `rl submit` to a cluster, through kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import ConfigError, RLError

_TIMEOUT_S = 120.0


class KubectlError(RLError):
    """kubectl failed; the message is its own."""


@dataclass(frozen=True)
class Job:
    """The object of a job in a cluster.

    Args:
        kind: `rayjob` or `raycluster`.
        name: Its name.
        namespace: Its namespace.
        context: Context of kubectl; empty for the current one.
    """

    kind: str
    name: str
    namespace: str
    context: str = ""

    @classmethod
    def parse(cls, id: str) -> Job:
        """Return the job of an id."""
        place, _, context = id.partition("@")
        namespace, kind, name = place.split("/")
        return cls(kind, name, namespace, context)

    @property
    def id(self) -> str:
        """`NAMESPACE/KIND/NAME`, followed by `@CONTEXT` if it has one."""
        return f"{self.namespace}/{self.kind}/{self.name}{f'@{self.context}' if self.context else ''}"

    @property
    def pods(self) -> str:
        """Selector of its pods."""
        return f"app.kubernetes.io/instance={self.name}"

    def command(self, *words: str) -> list[str]:
        """Return a command of kubectl in the job's namespace."""
        return [*kubectl(self.context, self.namespace), *words]

    def state(self) -> dict[str, Any] | None:
        """Return the object as the cluster has it; None if it does not exist."""
        shown = run(self.command("get", self.kind, self.name, "--ignore-not-found", "--output=json"))
        return json.loads(shown) if shown.strip() else None

    def head(self) -> str | None:
        """Return the name of the running pod of the head, if there is one."""
        selector = f"--selector={self.pods},ray.io/node-type=head"
        running = "--field-selector=status.phase=Running"
        shown = run(self.command("get", "pods", selector, running, "--output=name"))
        return next(iter(shown.split()), None)


def kubectl(context: str | None, namespace: str | None) -> list[str]:
    """Return the beginning of a command of kubectl.

    Raises:
        ConfigError: If it is not installed.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on the PATH. Install it, or use --dry-run and apply the manifest elsewhere.")
    chosen = {"--context": context, "--namespace": namespace}
    return ["kubectl", *(f"{option}={value}" for option, value in chosen.items() if value)]


def run(command: Sequence[str]) -> str:
    """Run a command of kubectl; returns what it prints.

    Raises:
        KubectlError: If it fails.
    """
    return read(command).decode(errors="replace")


def read(command: Sequence[str]) -> bytes:
    """Run a command of kubectl as `run` does; returns the bytes that it prints."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KubectlError(f"kubectl has not answered within {_TIMEOUT_S:.0f} s: {' '.join(command[:4])}") from None
    if done.returncode:
        raise KubectlError(done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}")
    return done.stdout
