"""The devices that a run can be planned for, with the rates of their data sheets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rl_core.config import nearest_as_remedy
from rl_core.errors import ConfigError

GB = 10**9
CPU_NAME = "cpu"
"""Name of the entry for a core of this machine's processor."""

ATTENTION = 0.34
"""The same of flash attention, both passes."""
MEMORY = 0.78
"""Share of `memory_rate` that kernels reach which only move data."""
LINKS = 0.8
"""Share of the rate of links that large collectives reach."""
NODE_LATENCY, NETWORK_LATENCY = 5e-6, 50e-6
"""Seconds that a collective takes next to its bytes each time that the number of its ranks doubles: within a node, and
of the nodes."""
LAUNCH_SECONDS = 53e-6
"""Seconds of the host for each operation of a layer that is not captured in a graph, with the code around it; measured
on one H100 (`benchmarks/results/gpu_check.md`)."""
WEIGHTS_MEMORY, DECODE_MEMORY = 0.9, 0.6
"""Shares of `memory_rate` that an engine's decoding reaches for weights, and for keys and values, which are blocks."""
KERNEL_SECONDS = 3e-6
"""Seconds that the smallest kernel of a graph takes, with the gap after it."""
DECODE_SECONDS = 1.5e-3
"""Seconds of an engine for each decoding step next to its kernels: scheduling, sampling and the start of a graph."""
TOKEN_SECONDS = 20e-6
"""Seconds of an engine for each token of a decoding step; the process in front of vLLM takes them
(`benchmarks/results/generation_front.md`)."""
OVERLAP_SLOWDOWN = 0.19
"""Share by which kernels are slower next to an exchange, as measured on A100 and H100
(https://arxiv.org/abs/2507.03114)."""
DISK_RATE = 2 * GB
"""Bytes per second that a node writes to the disk of checkpoints."""


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or a core of a processor, with the rates of its data sheet.

    Args:
        name: Name for `--device`.
        title: Name for people.
        driver_words: Words in the driver's name for it.
        memory: Bytes of memory; None if it is that of the machine.
        flops: Operations per second in bfloat16, dense; of a core in float32.
        memory_rate: Bytes per second that its memory reads or writes.
        node_rate: Bytes per second that it sends to others in the node.
        network_rate: Bytes per second that it sends to other nodes.
        host_rate: Bytes per second to and from the host's memory.
        products_share: Share of `flops` that large matrix products reach, less where power limits them.
        joined: Devices that the links within a node join where these reach further than a node; else 1.
    """

    name: str
    title: str
    driver_words: str
    memory: float | None
    flops: float
    memory_rate: float
    node_rate: float
    network_rate: float
    host_rate: float
    products_share: float
    joined: int = 1

    def link_rate(self, ranks: int, ranks_per_node: int, *, of_node: int = 1) -> float:
        """Return the bytes per second that each rank receives in a collective of large tensors.

        Args:
            ranks: Ranks from the first to the last of the group, also those between that are not in it.
            ranks_per_node: Ranks of a node.
            of_node: Ranks of the group on each node. What they gather enters a node once, through the adapters of all.
        """
        if ranks <= ranks_per_node:
            return LINKS * self.node_rate
        return LINKS * min(self.node_rate, max(1, of_node) * self.network_rate)

    def latency(self, ranks: int, ranks_per_node: int) -> float:
        """Return the seconds that a collective of so many neighbouring ranks takes next to its bytes."""
        nodes = max(1.0, ranks / ranks_per_node)
        return NODE_LATENCY * math.log2(ranks / nodes) + NETWORK_LATENCY * math.log2(nodes)


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Return all devices by name."""
    table = json.loads(files(__package__).joinpath("devices.json").read_text(encoding="utf-8"))
    return {
        name: Accelerator(
            name,
            row["title"],
            row["driver_words"],
            None if row["memory_gb"] is None else row["memory_gb"] * GB,
            row["bf16_tflops"] * 1e12,
            row["memory_gb_per_s"] * GB,
            row["node_gb_per_s"] * GB,
            row["network_gb_per_s"] * GB,
            row["host_gb_per_s"] * GB,
            row["products_share"],
            row.get("joined", 1),
        )
        for name, row in table.items()
    }


def accelerator_named(name: str) -> Accelerator:
    """Return a device by its name.

    Raises:
        ConfigError: If it is not known; lists those that are.
    """
    known = accelerators()
    found = known.get(name.lower())
    if found is None:
        remedy = nearest_as_remedy(name.lower(), known) or "Choose one of them"
        raise ConfigError(f"--device: got {name!r}; allowed: {', '.join(known)}. {remedy}")
    return found


def accelerator_of(driver_name: str) -> Accelerator | None:
    """Return the device that the driver gives this name; None if its rates are not known."""
    found = {each: each.driver_words.split() for each in accelerators().values()}
    named = [
        each for each, words in found.items() if words and all(re.search(rf"\b{word}\b", driver_name) for word in words)
    ]
    return max(named, key=lambda each: len(found[each]), default=None)
