"""A receiver of weights for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.torch.transport import open_receiver
from rl_core.weights import Digests, Manifest, Transport


def receive(manifest: Manifest, transport: Transport) -> tuple[dict[str, Tensor], Digests]:
    """All tensors as the first receiver gets them, and their digests."""
    with open_receiver(manifest, transport, 1, torch.device("cpu")) as receiver:
        tensors = {name: tensor.clone() for name, tensor in receiver}
        return tensors, receiver.digests
