"""Strangers at the rendezvous of a weight transfer are dropped, and the receivers are still accepted."""

from __future__ import annotations

import logging
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import pytest

from rl_core.errors import WeightSyncError
from rl_core.torch.transport import rendezvous
from rl_core.torch.transport.channel import Channel
from rl_core.torch.transport.rendezvous import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAX_PENDING,
    HandshakeError,
    accept_receivers,
    answer_challenge,
    find_sender,
    new_challenge,
    verify_hello,
)
from rl_core.weights import Transport

ELSEWHERE = b"another run's secret, of 32 bytes"


def framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


def recorded_hello(transport: Transport) -> bytes:
    """The hello of a real receiver on an earlier connection."""
    earlier = new_challenge()
    hello, _ = answer_challenge(transport.secret, earlier, 1)
    assert verify_hello(transport.secret, earlier, hello)[0] == 1
    return hello


Attack = Callable[[Transport, bytes], bytes]
"""Bytes that a stranger sends, given the transport (from which it may take only recordings) and the challenge."""

ATTACKS: dict[str, tuple[Attack, str]] = {
    "a rank without a proof": (lambda *_: framed(b'{"rank": 0}'), "something else"),
    "an object without a rank": (lambda *_: framed(b'{"x": 1}'), "something else"),
    "a list": (lambda *_: framed(b"[1]"), "something else"),
    "a rank that is text": (lambda *_: framed(b'{"rank": "zz"}'), "something else"),
    "HTTP": (lambda *_: b"GET / HTTP/1.1\r\n\r\n", "something else"),
    "TLS": (lambda *_: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "something else"),
    "a pickle": (lambda *_: pickle.dumps({"rank": 1}), "something else"),
    "a megabyte": (lambda *_: b"x" * 2**20, "something else"),
    "half a hello": (lambda *_: b"rlsync-1" + bytes(20), "left during its handshake"),
    "nothing": (lambda *_: b"", "left during its handshake"),
    "no proof": (lambda *_: b"rlsync-1" + bytes(HELLO_BYTES - 8), "does not have the secret"),
    "more than a hello": (lambda *_: b"rlsync-1" + bytes(2**16), "does not have the secret"),
    "the secret of another run": (lambda _, challenge: answer_challenge(ELSEWHERE, challenge, 1)[0], "secret"),
    "a recorded hello": (lambda transport, _: recorded_hello(transport), "secret"),
    "a recorded hello with another rank": (
        lambda transport, _: recorded_hello(transport)[:8] + struct.pack("!I", 2) + recorded_hello(transport)[12:],
        "secret",
    ),
    "its own challenge back": (lambda _, challenge: challenge.ljust(HELLO_BYTES, b"\0"), "secret"),
}


class Meeting:
    """A sender that waits for receivers in a thread."""

    def __init__(self, timeout_s: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=MAX_PENDING)
        self.address = self.listener.getsockname()
        self.transport = Transport("collective", f"127.0.0.1:{self.address[1]}", 1, timeout_s=timeout_s)
        self._accepted: Future[dict[int, Channel]] = Future()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            self._accepted.set_result(accept_receivers(self.listener, self.transport))
        except BaseException as error:  # noqa: BLE001 - raised in the test
            self._accepted.set_exception(error)

    def accepted(self) -> dict[int, Channel]:
        return self._accepted.result(60)

    def check_accepts(self) -> None:
        """The real receiver is accepted, and the ends hear each other."""
        channel = find_sender(socket.AF_INET, self.address, self.transport, 1)
        theirs = self.accepted()[1]
        channel.send({"from": "receiver"}, "test")
        theirs.send({"from": "sender"}, "test")
        assert theirs.receive("test") == {"from": "receiver"}
        assert channel.receive("test") == {"from": "sender"}
        theirs.close()
        channel.close()


@contextmanager
def meeting(timeout_s: float = 60.0) -> Iterator[Meeting]:
    found = Meeting(timeout_s)
    with found.listener:
        yield found


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the handshake of another waits too long for the test."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 3600.0)


@pytest.mark.parametrize(("attack", "reason"), ATTACKS.values(), ids=ATTACKS)
def test_a_stranger_is_dropped_and_the_receiver_accepted(
    attack: Attack, reason: str, caplog: pytest.LogCaptureFixture, patience: None
) -> None:
    with meeting() as met, caplog.at_level(logging.WARNING):
        with socket.create_connection(met.address, timeout=10) as stranger:
            challenge = stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            try:
                stranger.sendall(attack(met.transport, challenge))
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            except OSError:  # it was dropped before it had sent or read everything
                pass
        met.check_accepts()
    (record,) = caplog.records
    assert "dropped 1 connections" in record.message
    assert reason in record.message
    assert met.transport.secret.hex() not in record.message


def test_silent_strangers_delay_nobody(patience: None) -> None:
    with meeting() as met, ExitStack() as stack:
        for _ in range(MAX_PENDING + 20):
            stack.enter_context(socket.create_connection(met.address, timeout=10))
        met.check_accepts()


def send_slowly(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def test_a_stranger_that_sends_a_byte_at_a_time_is_dropped_at_the_end_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.3)
    with meeting() as met, socket.create_connection(met.address, timeout=10) as stranger:
        stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        with pytest.raises(ConnectionError):
            send_slowly(stranger, b"rlsync-1" + bytes(60))
        met.check_accepts()


def test_a_time_out_counts_the_strangers() -> None:
    with meeting(timeout_s=1.0) as met:
        for _ in range(3):
            with socket.create_connection(met.address, timeout=10) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while stranger.recv(CHALLENGE_BYTES):
                    pass
        with pytest.raises(WeightSyncError, match=r"have none; dropped 3 connections .* 127\.0\.0\.1 sent something"):
            met.accepted()


FALSE_SENDERS: dict[str, tuple[bytes, Callable[[bytes], bytes], str]] = {
    "another protocol": (b"SSH-2.0-OpenSSH_9.6".ljust(CHALLENGE_BYTES), lambda hello: b"", "something else"),
    "no proof": (b"rlsync-1" + bytes(32), lambda hello: bytes(32), "does not have the secret"),
    "the receiver's own proof": (b"rlsync-1" + bytes(32), lambda hello: hello[-32:], "does not have the secret"),
}


@pytest.mark.parametrize(("challenge", "answer", "reason"), FALSE_SENDERS.values(), ids=FALSE_SENDERS)
def test_a_receiver_refuses_a_false_sender(challenge: bytes, answer: Callable[[bytes], bytes], reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        way = Transport("collective", "", 1, timeout_s=30)

        def pose() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(challenge)
                connection.sendall(answer(connection.recv(HELLO_BYTES, socket.MSG_WAITALL)))

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(WeightSyncError, match=f"receiver rank 1: the process that listens at .* {reason}"):
            find_sender(socket.AF_INET, listener.getsockname(), way, 1)
        thread.join()


@pytest.mark.parametrize("closes", [True, False])
def test_a_receiver_tries_again_when_the_handshake_is_not_completed(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        way = Transport("collective", "", 1, timeout_s=30)
        found: Future[Channel] = Future()
        thread = threading.Thread(
            target=lambda: found.set_result(find_sender(socket.AF_INET, listener.getsockname(), way, 1))
        )
        thread.start()
        first, _ = listener.accept()
        first.close() if closes else stack.push(first)
        channels = accept_receivers(listener, way)
        thread.join()
        for channel in (found.result(), *channels.values()):
            channel.close()


def test_a_receiver_of_another_transport_is_not_accepted() -> None:
    with meeting(timeout_s=1.0) as met:
        other = Transport("collective", "", 1, timeout_s=0.5)
        with pytest.raises(WeightSyncError, match=r"timed out .* what listens there does not complete the handshake"):
            find_sender(socket.AF_INET, met.address, other, 1)
        with pytest.raises(WeightSyncError, match="does not have the secret"):
            met.accepted()


def test_a_proof_holds_for_its_connection_only() -> None:
    secret = bytes(range(32))
    first, second = new_challenge(), new_challenge()
    hello, expected = answer_challenge(secret, first, 7)
    assert verify_hello(secret, first, hello) == (7, expected)
    with pytest.raises(HandshakeError):
        verify_hello(secret, second, hello)
    assert answer_challenge(secret, first, 7)[1] != expected


def test_the_secret_is_random_travels_along_and_is_not_shown() -> None:
    way, other = (Transport("collective", "here:1", 1) for _ in range(2))
    assert way.secret != other.secret
    assert pickle.loads(pickle.dumps(way)) == way != other
    assert "secret" not in repr(way)
    assert repr(way.secret) not in repr(way)
    with pytest.raises(ValueError, match="at least 16 bytes, got 3"):
        Transport("collective", "here:1", 1, secret=b"abc")
