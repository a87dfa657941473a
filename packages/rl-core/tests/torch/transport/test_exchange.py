"""Ranks exchange parts of weights by messages between processes."""

from __future__ import annotations

import hashlib
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from splits import Engine, Fsdp, Megatron, Weight, cut
from transport_peers import Peer

from rl_core.errors import WeightSyncError
from rl_core.resharding import INTO_NODE, WITHIN_NODE
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.torch.transport import exchange
from rl_core.torch.transport.bucket import Parts, Region, lay_out, parts_to_send
from rl_core.torch.transport.exchange import Exchange, HeldPart, planned
from rl_core.weights import Manifest, TensorSpec

NUM_RANKS, PER_NODE = 8, 2
BUCKET_BYTES = 4096
NUM_VERSIONS = 3
TIMEOUT_S = 280
WAYS = (INTO_NODE, WITHIN_NODE)

CASES: dict[str, tuple[Fsdp | Megatron, Engine]] = {
    "fsdp to tp2": (Fsdp(shards=8), Engine(tp=2)),
    "fsdp2 tp2 ep2 pp2 to ep4": (Fsdp(pp=2, shards=2, tp=2, ep=2), Engine(tp=4, has_ep=True)),
    "megatron tp2 pp2 to tp2 pp2": (Megatron(pp=2, dp=2, tp=2), Engine(tp=2, pp=2)),
}


def model() -> dict[str, Weight]:
    weights = {"embedding": Weight((96, 40), "rows"), "scalar": Weight((), "copied")}
    for layer in range(4):
        weights[f"{layer}.q"] = Weight((64, 40), "rows", layer)
        weights[f"{layer}.o"] = Weight((40, 64), "columns", layer)
        weights[f"{layer}.norm"] = Weight((39,), "copied", layer)
        for expert in range(4):
            weights[f"{layer}.{expert}.up"] = Weight((24, 40), "rows", layer, expert)
            weights[f"{layer}.{expert}.down"] = Weight((40, 24), "columns", layer, expert)
    return weights


def dtype_of(name: str) -> str:
    return "float32" if name.endswith("norm") else "bfloat16"


def whole_model(version: int) -> dict[str, torch.Tensor]:
    """In float32, which most tensors are rounded from on their way."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in model().items()}


def kept_by(engine: Engine, rank: int) -> Parts:
    weights = model()
    read = {
        name: [Region.of(torch.empty(weight.shape, device="meta")[cut(box)]) for box in engine.boxes(weight, rank)]
        for name, weight in weights.items()
    }
    return parts_to_send(read, {name: weight.shape for name, weight in weights.items()})


class Counting:
    """`torch.distributed` that counts exchanges and the bytes that arrive, and may change a bit of one of them."""

    def __init__(self, breaks_at: int) -> None:
        self.calls = self.num_bytes = 0
        self._breaks_at = breaks_at

    def all_to_all_single(self, arrived: torch.Tensor, message: torch.Tensor, *splits: Any) -> None:
        dist.all_to_all_single(arrived, message, *splits)
        if arrived.dtype == torch.uint8:
            self.calls += 1
            self.num_bytes += arrived.numel()
            if self.calls == self._breaks_at:
                arrived[-1] ^= 1


def run(rank: int, port: int, case: str, breaks_at: int) -> tuple[int, int, int, str, int]:
    """Exchange several versions; the collectives and the bytes that arrived in the last one, the bytes that are kept,
    the plan's digest, and the number of buckets."""
    trainer, engine = CASES[case]
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    assert dist.group.WORLD is not None
    weights, plan = model(), None
    for version in range(1, NUM_VERSIONS + 1):
        specs = tuple(TensorSpec(name, weight.shape, dtype_of(name)) for name, weight in weights.items())
        layout = lay_out(Manifest(version, specs), BUCKET_BYTES, spreads=True).keeping(kept_by(engine, rank))
        values = whole_model(version)
        holdings = {
            name: [HeldPart(box, values[name][cut(box)].clone()) for box in trainer.boxes(weight, rank)]
            for name, weight in weights.items()
        }
        counting = Counting(breaks_at if rank == 0 else 0)
        messages = SimpleNamespace(**{**vars(dist), "all_to_all_single": counting.all_to_all_single})
        with (
            mock.patch.object(exchange, "node_name", return_value=str(rank // PER_NODE)),
            mock.patch.object(exchange, "dist", messages),
        ):
            before, plan = plan, planned(plan, layout, holdings, dist.group.WORLD, BUCKET_BYTES)
            assert before is None or before is plan, "the plan is made once"
            own = Exchange.among_senders(plan, layout, holdings, torch.device("cpu"))
            for bucket in layout.buckets:
                buffer = torch.full((bucket.num_bytes,), 0x55, dtype=torch.uint8)
                own.fill(bucket, buffer)
                expected = torch.full_like(buffer, 0x55)
                for slot in bucket.slots:
                    slot.fill(expected, values[slot.spec.name].to(getattr(torch, slot.spec.dtype)))
                assert breaks_at or buffer.equal(expected), bucket
            own.check()
    dist.destroy_process_group()
    kept = sum(bucket.num_bytes for bucket in layout.buckets)
    digest = hashlib.sha256(repr((plan.waves, plan.kind_of)).encode()).hexdigest()
    return counting.calls, counting.num_bytes, kept, digest, len(layout.buckets)


def run_all(case: str, breaks_at: int = 0) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    peers = [Peer(run, rank, port, case, breaks_at) for rank in range(NUM_RANKS)]
    try:
        return [peer.result()[0] for peer in peers]
    finally:
        for peer in peers:
            peer.end()


@pytest.mark.parametrize("case", partly_exhaustive(list(CASES), always=["fsdp2 tp2 ep2 pp2 to ep4"]))
def test_each_rank_gets_what_its_receiver_keeps_bit_for_bit(case: str) -> None:
    found = run_all(case)
    assert not [each for each in found if isinstance(each, Exception)]
    assert len({(calls, digest) for calls, _, _, digest, _ in found}) == 1
    assert all(num_bytes <= kept for _, num_bytes, kept, _, _ in found)
    # They follow from the bytes, not from the number of tensors.
    assert found[0][0] <= 2 * len(WAYS) * found[0][4]


@pytest.mark.parametrize("breaks_at", partly_exhaustive([1, 4], always=[4]))
def test_a_bit_that_changes_on_its_way_is_noticed_and_named(breaks_at: int) -> None:
    first = run_all("fsdp to tp2", breaks_at)[0]
    assert isinstance(first, WeightSyncError)
    assert "rank 0 received from rank" in str(first)
    assert set(first.tensors) < set(model())
