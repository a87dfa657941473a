"""Rendezvous of the sender and its receivers, which prove to each other that they have the transport's secret.

The proof is challenge and response by HMAC-SHA256. The messages have fixed lengths, so that nothing of a peer is parsed
before it has proven itself::

    sender -> receiver   magic, nonce of the sender                     40 bytes
    receiver -> sender   magic, rank, nonce of the receiver, proof      76 bytes
    sender -> receiver   proof                                          32 bytes

A proof is the HMAC of a label for the side, both nonces and the rank. Both nonces are fresh on each connection, so a
recorded message proves nothing on another one. What follows on the connection is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Layout, Parts, decoded, encoded
from rl_core.torch.transport.channel import Channel, Deadline, Receivers
from rl_core.weights import Transport

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Timeout in seconds of one peer's handshake."""
MAX_PENDING = 128
"""Maximum number of connections in a handshake; a new one then replaces the oldest."""

_FIRST_RETRY_S, _LAST_RETRY_S = 0.001, 0.05
_CREDENTIALS = struct.Struct("3i")

_MAGIC = b"rlsync-1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CHALLENGE = struct.Struct(f"!8s{_NONCE_BYTES}s")
_HELLO = struct.Struct(f"!8sI{_NONCE_BYTES}s{_PROOF_BYTES}s")

CHALLENGE_BYTES = _CHALLENGE.size
"""Length of the sender's first message."""
HELLO_BYTES = _HELLO.size
"""Length of the receiver's message."""
ANSWER_BYTES = _PROOF_BYTES
"""Length of the sender's second message."""


def accept_receivers(
    listener: socket.socket,
    transport: Transport,
    count: int | None = None,
    name: Callable[[int], str] = "receiver rank {}".format,
) -> Receivers:
    """Wait for the receivers of a transport and return their channels by rank.

    A peer is a receiver once it has proven that it has the transport's secret, and on a Unix socket runs as this user.
    All others are dropped, and reported by one warning; none of them delays the receivers.

    Args:
        listener: Socket that they connect to.
        transport: Transfer settings.
        count: Number of peers to wait for; the number of receivers unless given.
        name: Returns the name of a peer, by rank.

    Raises:
        WeightSyncError: If the receivers do not come in time, or two of them have the same rank.
    """
    deadline = Deadline(transport.timeout_s, "")
    channels = Receivers()
    count = transport.num_receivers if count is None else count
    with _Reception(listener, transport, name) as reception:
        try:
            while len(channels) < count:
                present = f"have ranks {sorted(channels)}" if channels else "have none"
                deadline.phase = (
                    f"sender rank 0 in rendezvous, waiting for {count} receivers ({present}{reception.dropped()})"
                )
                for rank, channel in reception.poll(deadline.slice()):
                    if rank in channels:
                        channel.abort(f"another peer is {channel.peer} too")
                        channel.close()
                        raise WeightSyncError(f"two receivers have rank {rank}")
                    channels[rank] = channel
        except WeightSyncError as error:
            channels.abort(str(error))
            channels.close()
            raise
    return Receivers(sorted(channels.items()))


@dataclass
class _Pending:
    """A connection whose peer has yet to prove itself."""

    connection: socket.socket
    peer: str
    challenge: bytes
    end: float
    hello: bytearray = field(default_factory=bytearray)


class _Reception:
    """The handshakes with all who connect, side by side and without blocking."""

    def __init__(self, listener: socket.socket, transport: Transport, name: Callable[[int], str]) -> None:
        self._listener = listener
        self._transport = transport
        self._name = name
        # Connections by descriptor, the oldest first.
        self._pending: dict[int, _Pending] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._num_dropped = 0
        self._first_dropped = ""
        listener.setblocking(False)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pending in self._pending.values():
            pending.connection.close()
        if self._num_dropped:
            _log.warning("weight sync at %s%s", self._transport.address, self.dropped())

    def dropped(self) -> str:
        """Return the number of connections that were not receivers' and the first reason; empty if there were none."""
        if not self._num_dropped:
            return ""
        return f"; dropped {self._num_dropped} connections that are not receivers, the first: {self._first_dropped}"

    def poll(self, timeout_s: float) -> list[tuple[int, Channel]]:
        """Wait for at most this long, and return the receivers that have proven themselves meanwhile."""
        received = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (pending := self._pending.get(key.fd)) is not None:
                received += self._read(pending)
        now = time.monotonic()
        for pending in [each for each in self._pending.values() if each.end <= now]:
            self._drop(pending, f"did not finish its handshake within {HANDSHAKE_S:g} s")
        return received

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # It has left already.
            return
        peer = str(address[0]) if connection.family != socket.AF_UNIX else "a process of this node"
        connection.setblocking(False)
        pending = _Pending(connection, peer, new_challenge(), time.monotonic() + HANDSHAKE_S)
        if len(self._pending) >= MAX_PENDING:
            self._drop(next(iter(self._pending.values())), "did not finish its handshake before many others connected")
        self._pending[connection.fileno()] = pending
        self._selector.register(connection, selectors.EVENT_READ)
        if not _same_user(connection):
            self._drop(pending, "runs as another user")
            return
        try:
            connection.send(pending.challenge)  # It fits into the buffer of a new connection.
        except OSError:
            self._drop(pending, "left during its handshake")

    def _read(self, pending: _Pending) -> list[tuple[int, Channel]]:
        """Read what has come of a hello; returns the receiver if that is complete and right."""
        try:
            data = pending.connection.recv(HELLO_BYTES - len(pending.hello))
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._drop(pending, "left during its handshake")
            return []
        pending.hello += data
        try:
            check_prefix(pending.hello)
            if len(pending.hello) < HELLO_BYTES:
                return []
            rank, answer = verify_hello(self._transport.secret, pending.challenge, bytes(pending.hello))
            pending.connection.send(answer)
        except HandshakeError as error:
            self._drop(pending, str(error))
            return []
        except OSError:
            self._drop(pending, "left during its handshake")
            return []
        self._forget(pending)
        pending.connection.setblocking(True)
        return [(rank, Channel(pending.connection, self._name(rank), self._transport.timeout_s))]

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]

    def _drop(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        pending.connection.close()
        self._num_dropped += 1
        self._first_dropped = self._first_dropped or f"{pending.peer} {reason}"


def await_ready(channels: Mapping[int, Channel], layout: Layout, parts: Parts | None = None) -> Layout:
    """Wait until every receiver is ready for this transfer; returns the layout with the parts that they keep.

    Args:
        channels: Connections to the receivers, by rank.
        layout: Buckets of the transfer with all tensors whole.
        parts: Parts that they kept the last time, and still do unless one of them reports others.

    Raises:
        WeightSyncError: Naming a receiver that is ready for another one.
    """
    said = {rank: channel.receive("the beginning of a transfer") for rank, channel in channels.items()}
    kept = [message["parts"] for message in said.values() if "parts" in message]
    wanted = layout.keeping(decoded(kept[0]) if kept else parts or {})
    for rank, message in said.items():
        if message["ready"] != wanted.fingerprint:
            raise WeightSyncError(f"receiver rank {rank} expects another manifest than the sender's")
    return wanted


def say_ready(channel: Channel, layout: Layout, *, with_parts: bool = False) -> None:
    """Tell the sender for which transfer this receiver is ready.

    Args:
        channel: Connection to the sender.
        layout: Buckets that this receiver expects.
        with_parts: True to tell which parts it keeps, for itself and those that keep the same.
    """
    parts = {"parts": encoded(layout.parts)} if with_parts else {}
    channel.send({"ready": layout.fingerprint, **parts}, "the beginning of a transfer")


def find_sender(
    family: socket.AddressFamily, address: str | tuple[str, int], transport: Transport, rank: int, who: str = ""
) -> Channel:
    """Connect to the sender, waiting until it listens; both ends prove that they have the transport's secret.

    Args:
        family: Family of the sender's socket.
        address: Its address.
        transport: Transfer settings.
        rank: Rank of this process among those that connect.
        who: Its name in errors; a receiver's name unless given.

    Raises:
        WeightSyncError: If no sender answers in time, or what listens at the address is not the sender.
    """
    who = who or f"receiver rank {rank}"
    waiting = f"{who} in rendezvous, waiting for the sender at {address!r}"
    deadline = Deadline(transport.timeout_s, waiting)
    pause_s = _FIRST_RETRY_S
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(deadline.remaining())
            connection.connect(address)
            if not _same_user(connection):
                raise HandshakeError("runs as another user")
            _prove(connection, transport.secret, rank, deadline)
            return Channel(connection, "the sender", transport.timeout_s)
        except HandshakeError as error:
            connection.close()
            raise WeightSyncError(f"{who}: the process that listens at {address!r} {error}") from None
        except _HandshakeEnded:
            # not the sender of this transport, a sender that is ending, or one that many strangers connect to
            deadline.phase = f"{waiting}; what listens there does not complete the handshake"
        except (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError):
            pass
        except WeightSyncError:
            connection.close()
            raise
        connection.close()
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(2 * pause_s, _LAST_RETRY_S)


class _HandshakeEnded(Exception):
    """Raised if the other end closed the connection or fell silent before it had answered."""


def _prove(connection: socket.socket, secret: bytes, rank: int, deadline: Deadline) -> None:
    """Perform the receiver's side of the handshake, within `HANDSHAKE_S`."""
    end = time.monotonic() + HANDSHAKE_S

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if time.monotonic() >= end:
                raise _HandshakeEnded
            connection.settimeout(deadline.slice())
            try:
                part = connection.recv(count - len(data))
            except TimeoutError:
                continue
            if not part:
                raise _HandshakeEnded
            data += part
        return bytes(data)

    try:
        hello, expected = answer_challenge(secret, exactly(CHALLENGE_BYTES), rank)
        connection.sendall(hello)
        if not hmac.compare_digest(exactly(ANSWER_BYTES), expected):
            raise HandshakeError("does not have the secret of this transfer")
    except ConnectionError:
        raise _HandshakeEnded from None


def _same_user(connection: socket.socket) -> bool:
    """Return whether a local peer runs as this user; abstract sockets have no permissions."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()


class HandshakeError(Exception):
    """Raised if a peer sent something else than its part, or does not have the secret; the message shows which."""


def new_challenge() -> bytes:
    """Return the sender's first message on a connection, with a nonce of its own."""
    return _CHALLENGE.pack(_MAGIC, secrets.token_bytes(_NONCE_BYTES))


def verify_hello(secret: bytes, challenge: bytes, hello: bytes) -> tuple[int, bytes]:
    """Return the rank of the receiver, and the sender's answer to it.

    Args:
        secret: Secret of the transport.
        challenge: The sender's message on this connection.
        hello: The receiver's message, or its first bytes.

    Raises:
        HandshakeError: If the message has another form, or its proof is wrong.
    """
    check_prefix(hello)
    if len(hello) != HELLO_BYTES:
        raise HandshakeError(f"sent {len(hello)} bytes of {HELLO_BYTES}")
    _, rank, nonce, proof = _HELLO.unpack(hello)
    nonces = challenge[len(_MAGIC) :] + nonce
    if not hmac.compare_digest(proof, _proof(secret, b"receiver", nonces, rank)):
        raise HandshakeError("does not have the secret of this transfer")
    return rank, _proof(secret, b"sender", nonces, rank)


def answer_challenge(secret: bytes, challenge: bytes, rank: int) -> tuple[bytes, bytes]:
    """Return the receiver's message, and the answer of a sender that has the secret.

    Args:
        secret: Secret of the transport.
        challenge: The sender's first message.
        rank: Rank of this receiver, non-negative.

    Raises:
        HandshakeError: If the challenge has another form.
    """
    check_prefix(challenge)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = challenge[len(_MAGIC) :] + nonce
    hello = _HELLO.pack(_MAGIC, rank, nonce, _proof(secret, b"receiver", nonces, rank))
    return hello, _proof(secret, b"sender", nonces, rank)


def check_prefix(message: bytes | bytearray) -> None:
    """Check the first bytes of a message; any number of them may have arrived.

    Raises:
        HandshakeError: If they do not begin a handshake.
    """
    head = message[: len(_MAGIC)]
    if not _MAGIC.startswith(head):
        raise HandshakeError(f"sent something else than a handshake, beginning with {bytes(head)!r}")


def _proof(secret: bytes, side: bytes, nonces: bytes, rank: int) -> bytes:
    return hmac.digest(secret, side + b"\0" + nonces + struct.pack("!I", rank), "sha256")
