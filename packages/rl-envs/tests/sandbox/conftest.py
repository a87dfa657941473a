"""A sandbox of the strongest kind that this machine offers, and a server of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rl_envs.sandbox.program import Limits
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.server import SandboxServer


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    for isolation in ("namespaces", "landlock"):
        try:
            with Sandbox(isolation, limits=Limits(cpu_s=20.0, wall_s=120.0)) as opened:
                yield opened
            return
        except SandboxUnavailable:
            continue
    pytest.skip("this machine offers no sandbox")


@pytest.fixture(scope="module")
def server(sandbox: Sandbox) -> Iterator[SandboxServer]:
    with SandboxServer(sandbox) as opened:
        thread = threading.Thread(target=opened.serve_forever)
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()
