"""Agents and tests on a server of sandboxes, by the protocol of SandboxFusion."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseServer

import pytest

from rl_core.rollouts.environment import AgentRun, Conversation
from rl_envs.repository import example_agent
from rl_envs.repository.environment import RepositoryEnvironment
from rl_envs.repository.plugin import RepositoryConfig
from rl_envs.sandbox.program import Limits
from rl_envs.sandbox.sandbox import Sandbox
from rl_envs.sandbox.server import SandboxServer

INFO = {
    "repository": {"answer.py": "ANSWER = None\n"},
    "tests": "python -c 'import answer; assert answer.ANSWER == 46'",
}


class Policy(http.server.BaseHTTPRequestHandler):
    """Answers 46 to whoever has the key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        is_known = (self.path, self.headers["Authorization"]) == ("/rollouts/a/v1/chat/completions", "Bearer key")
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "46"}}]}).encode()
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _served(server: BaseServer) -> Iterator[None]:
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("key", "reward"), [("key", 1.0), ("another", 0.0)])
def test_an_agent_runs_on_a_server_whose_network_reaches_the_policy(key: str, reward: float) -> None:
    policy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    # a level without a network of its own stands for a server that gives programs one
    with Sandbox("limits", limits=Limits(cpu_s=20.0, wall_s=120.0)) as sandbox:
        server = SandboxServer(sandbox)
        with _served(policy), _served(server):
            agent = AgentRun(
                ("python", "example_agent.py"),
                {"example_agent.py": Path(example_agent.__file__).read_bytes()},
                {},
                f"http://127.0.0.1:{policy.server_address[1]}/rollouts/a",
                key,
            )
            environment = RepositoryEnvironment(RepositoryConfig.model_validate({"sandbox": {"url": server.url}}))
            asked = Conversation("a", ({"role": "user", "content": "12+34="},), INFO, "", agent_run=agent)
            state = None
            while not (result := environment.step([asked], [state])[0]).done:
                state = result.state
                time.sleep(0.01)
    assert result.rewards()["reward"] == reward
    assert ("HTTP Error 401" in result.info["agent_failure"]) == (not reward)
