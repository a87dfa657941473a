"""Exchange of parts of tensors between the ranks of a policy and ranks of engines that have other devices.

They are the ranks of one process group, made by hand: the policy's first rank, which leads, then the receivers in the
order of their ranks, then the policy's other ranks. All of them make the same plan (`rl_core.resharding`), in which the
policy's ranks hold parts and the receivers keep parts; receivers pass on to one another the parts that several of them
keep on one node. Nobody has a whole tensor.

Every rank has a channel to the leader. What all must agree on travels there in rounds: each rank reports to the leader,
which answers each. The leader watches all channels while it waits for anything, so that it notices a rank that is lost
and reports it to the others.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.resharding import Share
from rl_core.torch.transport.bucket import Bucket, Layout
from rl_core.torch.transport.changes import ChangedLanes
from rl_core.torch.transport.channel import Receivers
from rl_core.torch.transport.collective import found_group, host_and_port, join_offered
from rl_core.torch.transport.exchange import Exchange, Holdings, KeptPlan, RankShare, balanced, plan_of
from rl_core.torch.transport.link import PHASE
from rl_core.torch.transport.rendezvous import MAX_PENDING, accept_receivers, find_sender
from rl_core.weights import Transport

Message = dict[str, Any]

_BEGINNING = "the beginning of a transfer"
_PLANNING = "planning the exchange"


class ApartLink:
    """One rank's end of the connection among all ranks of a policy and all receivers; a `ReceiverLink`, which the ranks
    of the policy use as well.

    Args:
        transport: Transfer settings, the same on all ranks.
        device: Device of this rank.
        rank: Rank of a receiver from 1 on, or of a rank of the policy from 0 on.
        num_senders: Number of ranks of the policy, on these; 0 on receivers.

    Attributes:
        sent_digests: On the policy's first rank, the digest of everything that each receiver was sent; empty elsewhere.
        num_bytes_sent: Bytes that this rank sent in the last transfer.
    """

    def __init__(self, transport: Transport, device: Device, rank: int, num_senders: int = 0) -> None:
        self._transport = transport
        self._device = device
        self._place = rank if not (num_senders and rank) else transport.num_receivers + rank
        self._plan: KeptPlan | None = None
        self._lanes = ChangedLanes() if transport.sends_changes else None
        self.sent_digests: list[str] = []
        self.num_bytes_sent = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        address, phase = host_and_port(transport.address), f"{self._name(self._place)}, joining the others"
        if self._place:
            found = find_sender(socket.AF_INET, address, transport, self._place, who=self._name(self._place))
            self._channels = Receivers({0: found})
        else:
            count = transport.num_receivers + num_senders - 1
            with socket.create_server(address, backlog=max(MAX_PENDING, count)) as listener:
                self._channels = accept_receivers(listener, transport, count, self._name)
        self.abort = self._channels.abort
        try:
            if self._place:
                self._group, _ = join_offered(found, transport, device, phase)
            else:
                if list(self._channels) != list(range(1, count + 1)):
                    raise WeightSyncError(f"an exchange needs ranks 1 to {count}, got {list(self._channels)}")
                self._group = found_group(self._channels, transport, device, phase)
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            self._channels.close()
            raise

    def begin(self, layout: Layout, holdings: Holdings | None = None) -> Layout:
        """Begin a transfer: agree with all ranks on it, and on the plan unless none has other parts than the last time.

        Args:
            layout: Layout with the parts that this rank keeps.
            holdings: Parts that it holds.

        Returns:
            The layout in buckets that every receiver keeps about as much of.

        Raises:
            WeightSyncError: If a rank expects other tensors, the held parts do not make up the tensors, or ranks made
                different plans.
        """
        wave_bytes = self._transport.bucket_bytes
        share = RankShare.of(layout, holdings or {})
        plan = "" if self._plan is None else self._plan.fingerprint
        own = {"ready": layout.manifest, "key": share.key(layout, wave_bytes), "plan": plan}
        answer = self._round(own, _BEGINNING, self._compare_readiness)
        if answer["keys"] or self._plan is None:
            self._plan = None
            shares = self._round({"share": _encoded(share)}, _PLANNING, _passed_on)["shares"]
            ordered, grouped, buckets = balanced(_decoded(shares), layout, wave_bytes)
            made = plan_of(ordered, grouped, self._place, answer["keys"], wave_bytes=wave_bytes)
            self._round({"plan": made.fingerprint}, _PLANNING, self._compare_plans)
            self._plan = made._replace(buckets=buckets)
        self._layout = layout = layout.grouped(self._plan.buckets)
        self._buffer = torch.empty(layout.capacity, dtype=torch.uint8, device=self._device.torch_device)
        self._exchange = Exchange(
            self._plan,
            layout,
            holdings or {},
            self._device.torch_device,
            travel=self._travel,
            rank=self._place,
            names=[self._name(place) for place in range(len(self._plan.keys))],
            lanes=self._lanes,
        )
        return layout

    def receive(self, bucket: Bucket) -> Tensor:
        """Send and receive what this rank does of a bucket; returns the parts that it keeps, until the next call."""
        self._phase = f"{self._name(self._place)}, bucket {bucket.index + 1} of {len(self._layout.buckets)}"
        buffer = self._buffer[: bucket.num_bytes]
        self._exchange.fill(bucket, buffer)
        return buffer

    def release(self, bucket: Bucket) -> None:
        """Do nothing: the next bucket is written in the same stream."""

    def finish(self, digests: Sequence[str] = ()) -> str:
        """Compare the received with the sent values; return the digest of everything that this rank received.

        Args:
            digests: Digests of whole buckets, which nobody sent.

        Raises:
            WeightSyncError: Naming the tensors of messages that arrived otherwise.
        """
        del digests
        exchange = self._exchange
        del self._exchange  # It refers to the weights.
        self.num_bytes_sent = exchange.num_bytes_sent
        self._buffer = self._buffer.new_empty(0)
        sent = {str(peer): found for peer, found in exchange.sent_digests().items()}
        told = self._round({"sent": sent}, PHASE, self._by_receiver)["told"]
        failure: WeightSyncError | None = None
        try:
            exchange.compare({int(peer): found for peer, found in told.items()})
        except WeightSyncError as error:
            failure = error
        own = {} if failure is None else {"wrong": str(failure), "tensors": failure.tensors}
        try:
            self._round(own, PHASE, self._verdict)
        except WeightSyncError as error:
            raise failure or error from None
        if self._lanes is not None:
            self._lanes.finish()
        return self._digest_of(self._place, {str(peer): found for peer, found in exchange.received_digests().items()})

    def close(self) -> None:
        """End the connection and free what it needed."""
        self._channels.close()
        self._group.close()

    def _round(self, own: Message, phase: str, answer: Callable[[Sequence[Message]], Sequence[Message]]) -> Message:
        """Report to the leader, and return its answer.

        Args:
            own: Report of this rank.
            phase: Phase, for errors.
            answer: Returns the leader's answer to each rank, from the reports of all.
        """
        phase = f"{self._name(self._place)}, {phase}"
        if self._place:
            self._channels[0].send(own, phase)
            return self._channels[0].receive(phase)
        answers = answer([own, *self._channels.gather(phase).values()])
        for place, channel in self._channels.items():
            channel.send(answers[place], phase)
        return answers[0]

    def _compare_readiness(self, reports: Sequence[Message]) -> list[Message]:
        for place, report in enumerate(reports):
            if report["ready"] != reports[0]["ready"]:
                raise WeightSyncError(f"{self._name(place)} expects another manifest than the sender's")
        keys = [report["key"] for report in reports]
        is_same = self._plan is not None and keys == list(self._plan.keys)
        is_known = is_same and all(report["plan"] == reports[0]["plan"] for report in reports)
        return [{"keys": [] if is_known else keys}] * len(reports)

    def _compare_plans(self, reports: Sequence[Message]) -> list[Message]:
        for place, report in enumerate(reports):
            if report["plan"] != reports[0]["plan"]:
                raise WeightSyncError(
                    f"{self._name(place)} made another plan of the exchange ({report['plan']}) than the sender's "
                    f"({reports[0]['plan']})"
                )
        return [{}] * len(reports)

    def _by_receiver(self, reports: Sequence[Message]) -> list[Message]:
        """Return to each rank the digests of the messages that the others sent it."""
        told: list[dict[str, list[int]]] = [{} for _ in reports]
        for place, report in enumerate(reports):
            for peer, digests in report["sent"].items():
                told[int(peer)][str(place)] = digests
        self.sent_digests = [
            self._digest_of(place, told[place]) for place in range(1, self._transport.num_receivers + 1)
        ]
        return [{"told": each} for each in told]

    def _verdict(self, reports: Sequence[Message]) -> list[Message]:
        wrong = [report for report in reports if "wrong" in report]
        if wrong:
            names = dict.fromkeys(name for report in wrong for name in report["tensors"])
            raise WeightSyncError("; ".join(report["wrong"] for report in wrong), tuple(names))
        return [{}] * len(reports)

    def _digest_of(self, place: int, messages: Mapping[str, Sequence[int]]) -> str:
        """Return one digest of the messages to a rank, which begins with the plan and the rank."""
        assert self._plan is not None, "begin comes first"
        found = repr(sorted((int(peer), list(digests)) for peer, digests in messages.items()))
        return f"{self._plan.fingerprint}.{place}-{hashlib.sha256(found.encode()).hexdigest()[:32]}"

    def _travel(self, arrived: Tensor, message: Tensor, received: list[int], sent: list[int]) -> None:
        options = dist.AllToAllOptions()
        begun = self._group.start(
            lambda group: group.alltoall_base(arrived, message, received, sent, options), self._phase
        )
        self._group.wait(begun)

    def _name(self, place: int) -> str:
        """Return the name of a rank of the group, for errors."""
        if 0 < place <= self._transport.num_receivers:
            return f"receiver rank {place}"
        return f"sender rank {place and place - self._transport.num_receivers}"


def _passed_on(reports: Sequence[Message]) -> list[Message]:
    return [{"shares": [report["share"] for report in reports]}] * len(reports)


def _encoded(share: RankShare) -> str:
    """Return a share as JSON carries it: numbers of the parts of 46,000 tensors take a few hundred bytes."""
    content = [[each.choices, each.chosen.tolist()] for each in (share.held, share.kept)]
    return base64.b64encode(zlib.compress(json.dumps([*content, share.node]).encode(), 1)).decode()


def _decoded(encoded: Sequence[str]) -> list[RankShare]:
    found = []
    for each in encoded:
        *shares, node = json.loads(zlib.decompress(base64.b64decode(each)))
        held, kept = (
            Share(
                tuple(tuple(tuple((start, stop) for start, stop in box) for box in boxes) for boxes in choices),
                np.array(chosen, np.int32),
            )
            for choices, chosen in shares
        )
        found.append(RankShare(held, kept, node))
    return found
