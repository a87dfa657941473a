"""The policy's weights on their way to the generators."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from torch import Tensor

from rl_core.torch.teamwork import together
from rl_core.torch.transport import open_sender
from rl_core.torch.transport.sender import Sender
from rl_core.weights import Digests, Manifest, Transport
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.weights import Weights


def manifest_of(weights: Weights, version: int, dtype: str) -> Manifest:
    """Every weight by Hugging Face name in the compute dtype; a tied head is named, not sent."""
    return Manifest(version, tuple(weights.specs(dtype)), weights.tied)


def send_weights(weights: Weights, manifest: Manifest, transport: Transport, dtype: str, mesh: Mesh) -> Digests:
    """Gather bucket by bucket on all ranks, and send from rank 0, or from every rank where each has receivers of its
    own; collective. Digests on ranks that send, empty elsewhere.

    Raises:
        WeightSyncError: where this rank's receivers do not come, or time runs out.
        RLError: where another rank's failed.
    """
    sends = transport.every_rank_sends or mesh.rank == 0
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        senders: list[Sender] = []

        def meet() -> None:
            if sends:
                sender = open_sender(manifest, transport, mesh.device, num_receivers=transport.num_receivers)
                senders.append(stack.enter_context(sender))

        def finish() -> None:
            for sender in senders:
                digests.update(sender.finish())

        together(mesh.control, meet)
        gathered: list[tuple[str, Tensor]] = []
        size = 0
        for tensors in weights.stream(dtype):
            size += sum(tensor.nbytes for _, tensor in tensors)
            gathered += tensors if sends else []
            if size >= transport.bucket_bytes:
                together(mesh.control, partial(_put, senders, gathered))
                gathered, size = [], 0
        together(mesh.control, partial(_put, senders, gathered))
        together(mesh.control, finish)
    return digests


def _put(senders: list[Sender], tensors: list[tuple[str, Tensor]]) -> None:
    for sender in senders:
        for name, tensor in tensors:
            sender.put(name, tensor)
