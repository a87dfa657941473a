"""A server in a thread of its own, and clients of the published package that call it."""

import asyncio
import logging
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
import tinker
from bigram_host import END, hosting

from rl_launch.root_config import TinkerConfig
from rl_launch.tinker.server import TinkerServer

# Clients whose server is gone go on in threads of their own, and would write into the output of other tests.
logging.getLogger("tinker").propagate = False
logging.getLogger("tinker").addHandler(logging.NullHandler())


class Served:
    """A running server.

    Attributes:
        server: The server.
        url: Its URL.
        hosts: The hosts that it has built, in order.
    """

    def __init__(self, folder, hosts, make, config):
        self.hosts, self.clients = hosts, []

        @contextmanager
        def kept():
            with make() as host:
                self.hosts.append(host)
                yield host

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.server = TinkerServer(kept, config, folder, [END])
        self.run(self.server.start())
        self.url = self.server.url

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def client(self, key="tml-test", **settings):
        made = tinker.ServiceClient(base_url=self.url, api_key=key, **settings)
        self.clients.append(made)
        return made

    def close(self):
        for client in self.clients:
            with suppress(Exception):  # a test may have ended the server's session, or the server
                client.close("success").result(timeout=10)
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Start servers over bigram hosts: `serve(make=..., port=..., ...)`; ends them after the test."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ExitStack() as stack:

        def start(make=hosting, folder="queue", **settings):
            config = TinkerConfig(**{"port": 0, "save_every": 3, **settings})
            served = Served(tmp_path / folder, [], make, config)
            stack.callback(lambda: served.close())
            return served

        yield start
