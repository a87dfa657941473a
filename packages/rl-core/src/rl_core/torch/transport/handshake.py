"""Mutual proof that both ends of a connection have the transport's secret: challenge and response by HMAC-SHA256.

The messages have fixed lengths, so that nothing of a peer is parsed before it has proven itself::

    sender -> receiver   magic, nonce of the sender                     40 bytes
    receiver -> sender   magic, rank, nonce of the receiver, proof      76 bytes
    sender -> receiver   proof                                          32 bytes

A proof is the HMAC of a label for the side, both nonces and the rank. Both nonces are fresh on each connection, so a
recorded message proves nothing on another one. What follows on the connection is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import secrets
import struct

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


class HandshakeError(Exception):
    """Raised if a peer sent something else than its part, or does not have the secret; the message shows which."""


class SenderHandshake:
    """The sender's side of one connection.

    Args:
        secret: Secret of the transport.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.challenge = _CHALLENGE.pack(_MAGIC, self._nonce)

    def verify(self, hello: bytes) -> tuple[int, bytes]:
        """Return the rank of the receiver, and the answer to send to it.

        Args:
            hello: The receiver's message, or its first bytes.

        Raises:
            HandshakeError: If the message has another form, or its proof is wrong.
        """
        check_prefix(hello)
        if len(hello) != HELLO_BYTES:
            raise HandshakeError(f"sent {len(hello)} bytes of {HELLO_BYTES}")
        _, rank, nonce, proof = _HELLO.unpack(hello)
        nonces = self._nonce + nonce
        if not hmac.compare_digest(proof, _proof(self._secret, b"receiver", nonces, rank)):
            raise HandshakeError("does not have the secret of this transfer")
        return rank, _proof(self._secret, b"sender", nonces, rank)


class ReceiverHandshake:
    """The receiver's side of one connection.

    Args:
        secret: Secret of the transport.
        rank: Rank of this receiver, non-negative.
        challenge: The sender's first message.

    Raises:
        HandshakeError: If the challenge has another form.
    """

    def __init__(self, secret: bytes, rank: int, challenge: bytes) -> None:
        check_prefix(challenge)
        _, theirs = _CHALLENGE.unpack(challenge)
        ours = secrets.token_bytes(_NONCE_BYTES)
        nonces = theirs + ours
        self.hello = _HELLO.pack(_MAGIC, rank, ours, _proof(secret, b"receiver", nonces, rank))
        self._expected = _proof(secret, b"sender", nonces, rank)

    def verify(self, answer: bytes) -> None:
        """Check the sender's answer.

        Raises:
            HandshakeError: If its proof is wrong.
        """
        if not hmac.compare_digest(answer, self._expected):
            raise HandshakeError("does not have the secret of this transfer")


def check_prefix(message: bytes | bytearray) -> None:
    """Check the first bytes of a message, of which any number may have arrived.

    Raises:
        HandshakeError: If they are not those of a handshake.
    """
    head = message[: len(_MAGIC)]
    if not _MAGIC.startswith(head):
        raise HandshakeError(f"sent something else than a handshake, beginning with {bytes(head)!r}")


def _proof(secret: bytes, side: bytes, nonces: bytes, rank: int) -> bytes:
    return hmac.digest(secret, side + b"\0" + nonces + struct.pack("!I", rank), "sha256")
