"""The policy's weights on their way to the generators."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from rl_core.torch.teamwork import lead
from rl_core.torch.transport import open_sender
from rl_core.torch.transport.sender import Sender
from rl_core.weights import Digests, Manifest, Transport, num_bytes
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.weights import Weights


def manifest_of(weights: Weights, version: int, dtype: str) -> Manifest:
    """Every weight by Hugging Face name in the compute dtype; a tied head is named, not sent."""
    return Manifest(version, tuple(weights.specs(dtype)), weights.tied)


def send_weights(weights: Weights, manifest: Manifest, transport: Transport, dtype: str, mesh: Mesh) -> Digests:
    """Bring the weights to rank 0 and send them from there; collective. Digests on rank 0, empty elsewhere."""
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        senders: list[Sender] = []
        lead(mesh.control, lambda: senders.append(stack.enter_context(open_sender(manifest, transport, mesh.device))))
        gathered: list[tuple[str, Tensor]] = []
        size = 0
        for spec, tensor in weights.stream(dtype):
            size += num_bytes(spec)
            if tensor is not None:
                gathered.append((spec.name, tensor))
            if size >= transport.bucket_bytes:
                lead(mesh.control, partial(_put, senders, gathered, mesh.device))
                gathered, size = [], 0
        lead(mesh.control, partial(_put, senders, gathered, mesh.device))
        lead(mesh.control, lambda: digests.update(senders[0].finish()))
    return digests


def _put(senders: list[Sender], tensors: list[tuple[str, Tensor]], device: torch.device) -> None:
    for name, tensor in tensors:
        senders[0].put(name, tensor.to(device))
