"""Speeds that a chip should reach, and how long work of a known size should take it.

They are estimates from published figures of H100s of 700 W: large products reach two thirds of the data sheet's peak,
kernels that only move data four fifths of the memory's bandwidth. A figure far below them is worth a look; none of them
is a bound of a check.

The times of the host are from one H100 in a virtual machine (`benchmarks/results/gpu_check.md`). An operator takes the
mean over six kernels that were timed alone, 0.66 to 1.12 ms for both passes of one to four operators. A launch of torch
takes so long that a step of the 0.6B model without fused kernels takes the time that it took there. So one constant is
fitted to one step, and none to the step with fused kernels, which comes out 11 % too fast. Other hosts differ: a launch
of torch alone takes 2 to 5 us, and the code around it, which is most of the time, runs faster on other processors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """Rates of a GPU.

    Args:
        products: Floating-point operations per second of large matrix products in bfloat16.
        attention_forward: The same of causal flash attention, by the generation of its kernels.
        attention_backward: The same of its backward pass.
        memory_bytes: Bytes per second that kernels read and write together.
        host_bytes: Bytes per second from or to pinned memory of the host.
        synced_bytes: Bytes per second of a weight transfer between processes, with a digest at both ends.
        node_bytes: Bytes per second that each GPU of a node sends in a collective of large tensors.
        network_bytes: The same for a GPU's network adapter.
        launch_seconds: Time of the host for an operation of torch, with its share of the code between kernels: modules,
            hooks of FSDP2, autograd, optimizer.
        operator_seconds: The same for an operator of this project, whose Triton program Python starts.
    """

    products: float
    attention_forward: Mapping[str, float]
    attention_backward: Mapping[str, float]
    memory_bytes: float
    host_bytes: float
    synced_bytes: float
    node_bytes: float
    network_bytes: float
    launch_seconds: float
    operator_seconds: float

    def attention(self, generation: str) -> float:
        """Return the rate of a forward pass with its backward pass, which has two and a half times the operations."""
        return 3.5 / (1 / self.attention_forward[generation] + 2.5 / self.attention_backward[generation])


H100 = Chip(
    products=620e12,
    attention_forward={"FA2": 370e12, "FA3": 600e12},
    attention_backward={"FA2": 300e12, "FA3": 480e12},
    memory_bytes=2.6e12,
    host_bytes=50e9,
    synced_bytes=50e9,
    node_bytes=360e9,
    network_bytes=45e9,
    launch_seconds=53e-6,
    operator_seconds=320e-6,
)
CHIPS: Mapping[str, Chip] = {"H100": H100, "H200": replace(H100, memory_bytes=3.8e12)}
"""Chips by a word of the driver's name for them."""


def chip_named(name: str) -> Chip | None:
    """Return the chip of a GPU by the driver's name for it; None if its rates are not known."""
    return next((chip for word, chip in CHIPS.items() if re.search(rf"\b{word}\b", name)), None)
