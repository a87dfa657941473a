"""Time that an engine rank takes to load each tensor of a mixture's experts, beside a copy of the same bytes.

    python benchmarks/expert_loading.py [EXPERTS:HIDDEN:WIDTH ...] [--share N] [--repeats N]

Needs rl-vllm with vLLM, and starts no engine: the layers are vLLM's layers of stacked experts without their kernels,
and the loads those that a weight sync makes. A rank keeps the experts of one of N ranks (`--share`). Weights arrive in
buffers, as over any transport, whose time does not count. The rows:

- a copy: the bytes that the rank keeps, by one `torch._foreach_copy_`
- straight to their places: `Receiver.by_bucket` and `WeightReceiver.load_parts`, which ranks of engines use
- by whole tensors: the iteration over a `Receiver`, for loaders that do more than copy

Processor time, best of some repeats that take turns. Small experts show what Python costs for each tensor, large ones
what the memory costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from measurement import surroundings, table
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from rl_core.torch.transport import ends
from rl_core.torch.transport.bucket import Bucket, Layout, lay_out
from rl_core.torch.transport.ends import Receiver
from rl_core.weights import Manifest, TensorSpec
from rl_vllm.weights.load_plan import plan_load
from rl_vllm.weights.planned_load import PlannedLoad
from rl_vllm.weights.weight_receiver import WeightReceiver

CASES = ("128:64:32", "64:512:192")
NUM_LAYERS = 4
BUCKET_BYTES = 2**26
KINDS = ("gate", "up", "down")


class Experts(RoutedExperts):
    """A layer that holds some of the experts, stacked as the kernels compute with them."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        nn.Module.__init__(self)
        w13, w2 = torch.zeros(count, 2 * width, hidden), torch.zeros(count, hidden, width)
        self.w13_weight = nn.Parameter(w13.bfloat16(), requires_grad=False)
        self.w2_weight = nn.Parameter(w2.bfloat16(), requires_grad=False)
        self.moe_config = SimpleNamespace(is_act_and_mul=True)
        self.quant_method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        nn.Module.__init__(self.quant_method)
        self.quant_method.unquantized_backend = UnquantizedMoeBackend.TRITON
        self.quant_method.moe_kernel = object()


class Mixture(nn.Module):
    """Layers of experts of one rank, with a loader as vLLM's models have it."""

    def __init__(self, experts: int, hidden: int, width: int, share: int) -> None:
        super().__init__()
        self.kept, self.width = experts // share, width
        self.layers = nn.ModuleList([Experts(self.kept, hidden, width) for _ in range(NUM_LAYERS)])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor of an expert that this rank keeps to its place."""
        for name, tensor in weights:
            layer, expert, kind = name.split(".")
            if int(expert) >= self.kept:
                continue
            module = self.layers[int(layer)]
            if kind == "down":
                module.w2_weight.data[int(expert)].copy_(tensor)
            else:
                first = self.width * KINDS.index(kind)
                module.w13_weight.data[int(expert), first : first + self.width].copy_(tensor)


class Arrived:
    """A receiving end whose buckets have arrived already."""

    def __init__(self, layout: Layout) -> None:
        self._buffers = [torch.rand(each.num_bytes // 2).bfloat16().view(torch.uint8) for each in layout.buckets]

    def receive(self, bucket: Bucket) -> Tensor:
        """Return the bytes of a bucket."""
        return self._buffers[bucket.index]

    def release(self, bucket: Bucket) -> None:
        """Do nothing."""

    def finish(self, digests: Sequence[str]) -> str:
        """Return no digest."""
        del digests
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, metavar="EXPERTS:HIDDEN:WIDTH")
    parser.add_argument("--share", type=int, default=2, help="ranks that the experts are divided over (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="loads, of which the best counts (%(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{surroundings('rl-vllm', 'torch')}; cpu, 1 thread, best of {chosen.repeats}\n")
    for case in chosen.cases:
        experts, hidden, width = map(int, case.split(":"))
        print(f"{NUM_LAYERS} layers of {experts} experts, {hidden} x {width}, 1 of {chosen.share} ranks\n")
        print(measured(experts, hidden, width, chosen.share, chosen.repeats))
        print()


@torch.no_grad()
def measured(experts: int, hidden: int, width: int, share: int, repeats: int) -> str:
    """Return the table of one case."""
    model = Mixture(experts, hidden, width, share)
    record_metadata_for_reloading(model)
    shapes = {kind: (hidden, width) if kind == "down" else (width, hidden) for kind in KINDS}
    names = [(layer, expert, kind) for layer in range(NUM_LAYERS) for expert in range(experts) for kind in KINDS]
    specs = tuple(TensorSpec(f"{layer}.{expert}.{kind}", shapes[kind], "bfloat16") for layer, expert, kind in names)
    manifest = Manifest(1, specs)
    plan = plan_load(model, manifest)
    planned = PlannedLoad.of(model, plan, torch.bfloat16)
    assert planned is not None
    config = SimpleNamespace(dtype=torch.bfloat16)
    receiver = WeightReceiver(model, config, manifest, plan, planned)  # type: ignore[arg-type]
    layout = lay_out(manifest, BUCKET_BYTES).keeping(receiver.parts)
    link = Arrived(layout)
    kept = [parameter.data[expert] for parameter in model.parameters() for expert in range(model.kept)]
    copies = [each.clone() for each in kept]

    def straight() -> None:
        arriving = Receiver(layout, link)  # type: ignore[arg-type]
        receiver.load_parts(
            ((slot.spec.name, partial(bucket.read, slot)) for slot in bucket.slots) for bucket in arriving.by_bucket()
        )

    ways: dict[str, Callable[[], object]] = {
        "a copy": lambda: torch._foreach_copy_(kept, copies),
        "straight to their places": straight,
        "by whole tensors": lambda: receiver.load(iter(Receiver(layout, link))),  # type: ignore[arg-type]
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    # Digests are part of the transfer, whatever takes the weights in.
    with mock.patch.object(ends, "begin_digest"), mock.patch.object(ends, "read_digests", return_value=[]):
        for _ in range(repeats):
            for name, way in ways.items():
                began = time.process_time()
                way()
                taken[name].append(time.process_time() - began)
    num_kept, copied = len(specs) // share, min(taken["a copy"])
    rows = [(name, f"{1e6 * min(took) / num_kept:.1f}", f"{min(took) / copied:.1f}") for name, took in taken.items()]
    return table(["", "us per kept tensor", "to a copy"], rows)


if __name__ == "__main__":
    main()
