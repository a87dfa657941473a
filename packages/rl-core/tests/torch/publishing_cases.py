"""A transfer by ranks of a pool, of made-up weights and to a sender that may fail."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from joined_rank import joined

from rl_core.errors import RLError, WeightSyncError
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.training import publishing
from rl_core.weights import Manifest, TensorSpec, Transport

NUM_TENSORS = 300
SPECS = tuple(TensorSpec(f"layer.{number}", (2,), "float32") for number in range(NUM_TENSORS))
BUCKET_BYTES = 8
"""One tensor of two float32 values."""


def send(rank: Rank, failing: int | None, fails_at: int) -> tuple[str, int, int, int]:
    """Send weights from both ranks; the error, and the numbers of tensors that were brought together and put, and of
    agreements."""
    gathered, put, agreements = [], [], []
    agree = publishing.on_all_ranks

    def stream(dtype: str, **_: Any) -> Any:
        for spec in SPECS:
            gathered.append(spec.name)
            yield [(spec.name, torch.zeros(2))]

    def take(name: str, tensor: torch.Tensor) -> None:
        if rank.rendezvous.rank == failing and len(put) == fails_at:
            raise WeightSyncError("a receiver is gone")
        put.append(name)

    @contextmanager
    def transfer(manifest: Manifest, transport: Transport) -> Any:
        yield SimpleNamespace(put=take, finish=lambda: ["digest"])

    def counted(group: Any, action: Any) -> None:
        agreements.append(action)
        agree(group, action)

    error = ""
    with joined(rank) as group, mock.patch.object(publishing, "on_all_ranks", counted):
        end: Any = SimpleNamespace(transfer=transfer)
        weights: Any = SimpleNamespace(stream=stream)
        mesh: Any = SimpleNamespace(rank=rank.rendezvous.rank, control=group)
        transport = Transport("ipc", "", 1, bucket_bytes=BUCKET_BYTES, every_rank_sends=True)
        try:
            publishing.send_weights(end, weights, Manifest(1, SPECS, {}), transport, "float32", mesh)
        except RLError as failure:
            error = f"{type(failure).__name__}: {failure}"
    return error, len(gathered), len(put), len(agreements)
