"""Rendezvous of the sender and its receivers."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping

from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Layout
from rl_core.torch.transport.channel import Channel
from rl_core.torch.transport.deadline import Deadline
from rl_core.torch.transport.parts import Parts, decoded, encoded

_HANDSHAKE_S = 10.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.001, 0.05
_CREDENTIALS = struct.Struct("3i")


def accept_receivers(listener: socket.socket, count: int, timeout_s: float) -> dict[int, Channel]:
    """Wait for `count` receivers; their channels by rank."""
    channels: dict[int, Channel] = {}
    deadline = Deadline(timeout_s, "")
    try:
        while len(channels) < count:
            present = f"have ranks {sorted(channels)}" if channels else "have none"
            deadline.phase = f"sender rank 0 in rendezvous, waiting for {count} receivers ({present})"
            rank, channel = _accept(listener, deadline, timeout_s)
            if rank in channels:
                channel.abort(f"another receiver has rank {rank}")
                channel.close()
                raise WeightSyncError(f"two receivers have rank {rank}")
            channels[rank] = channel
    except WeightSyncError as error:
        abort_all(channels.values(), str(error))
        raise
    return dict(sorted(channels.items()))


def _accept(listener: socket.socket, deadline: Deadline, timeout_s: float) -> tuple[int, Channel]:
    while True:
        listener.settimeout(deadline.slice())
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if not _same_user(connection):
            connection.close()
            continue
        channel = Channel(connection, "a receiver", min(timeout_s, _HANDSHAKE_S))
        try:
            hello = channel.receive("rendezvous")
        except (WeightSyncError, ValueError):
            # not one of ours, or one that died on the way in
            channel.close()
            continue
        rank = int(hello["rank"])
        return rank, Channel(connection, f"receiver rank {rank}", timeout_s)


def await_ready(channels: Mapping[int, Channel], layout: Layout, parts: Parts | None = None) -> Layout:
    """Wait until every receiver is ready for this transfer; returns the layout with the parts that they keep.

    Args:
        parts: that they kept the last time, and still do unless one of them says otherwise.

    Raises:
        WeightSyncError: naming a receiver that is ready for another one.
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
        with_parts: whether to tell which parts it keeps, for itself and those that keep the same.
    """
    parts = {"parts": encoded(layout.parts)} if with_parts else {}
    channel.send({"ready": layout.fingerprint, **parts}, "the beginning of a transfer")


def find_sender(family: socket.AddressFamily, address: str | tuple[str, int], rank: int, timeout_s: float) -> Channel:
    """Connect to the sender, waiting until it listens."""
    deadline = Deadline(timeout_s, f"receiver rank {rank} in rendezvous, waiting for the sender at {address!r}")
    pause_s = _FIRST_RETRY_S
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(deadline.remaining())
        try:
            connection.connect(address)
            break
        except (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError):
            connection.close()
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
    if not _same_user(connection):
        connection.close()
        raise WeightSyncError(f"receiver rank {rank}: another user's process listens at {address!r}")
    channel = Channel(connection, "the sender", timeout_s)
    channel.send({"rank": rank}, "rendezvous")
    return channel


def abort_all(channels: Iterable[Channel], reason: str) -> None:
    """Say why on every channel, then close them."""
    for channel in channels:
        channel.abort(reason)
        channel.close()


def _same_user(connection: socket.socket) -> bool:
    """Whether a local peer runs as this user; abstract sockets have no permissions of their own."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()
