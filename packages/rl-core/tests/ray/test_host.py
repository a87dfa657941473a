"""Ports that a worker keeps for itself until its ranks meet there."""

import errno
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rl_core.ray.host import hold_port


def test_nobody_else_gets_a_port_that_is_held():
    with hold_port() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use") as refused:
            other.bind(("", held.getsockname()[1]))
        assert refused.value.errno == errno.EADDRINUSE


def test_listeners_that_ranks_meet_at_open_on_a_port_that_is_held():
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)):
            pass
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=5))
        store.set("met", "yes")
        assert store.get("met") == b"yes"
