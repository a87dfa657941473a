"""The interface of a device."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import torch

NODE_ADDRESS = "RL_NODE_ADDRESS"
"""Environment variable of a worker's process and its children: the address of its node as other nodes reach it."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

LOOPBACK = "127.0.0.1"


class ClusterSizes(Protocol):
    """The sizes that a `cluster` section states."""

    gpus_per_node: int
    cpu_ranks_per_node: int


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory.

    Args:
        total: All of it.
        free: Bytes that no process holds.
        own: Bytes that torch's allocator in this process holds, for tensors or for later ones. Contexts and
            communicators of the process are neither among these nor free.
        peak: Largest number of bytes of this process's tensors at one time since `Device.reset_peak`.
    """

    total: int
    free: int
    own: int
    peak: int

    @property
    def available(self) -> int:
        """Bytes that tensors of this process can take."""
        return self.free + self.own


@dataclass(frozen=True)
class Device:
    """A device as the launcher plans with it, and as the process that computes on it uses it. What a kind does
    not override is right for cores, whose memory is the host's.

    Args:
        index: Position among the devices that the process sees.
    """

    index: int = 0

    name: ClassVar[str]
    """The value of `cluster.device`."""
    extras: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    """Which of a `Requirement`'s extras bring an engine that computes on it."""
    has_gpus: ClassVar[bool] = False
    """True if Ray gives every rank a GPU for itself: replicas divide a node's GPUs, models and replicas that share GPUs
    leave their memory to one another, and memory of one GPU is reached only from that GPU."""
    ranks_key: ClassVar[str]
    """Key of the number of ranks per node, for messages."""
    bucket_bytes: ClassVar[int]
    """Default size of the buckets that weights travel in."""
    collectives: ClassVar[Literal["gloo", "nccl"]] = "gloo"
    """Library of the collectives of its tensors."""
    is_logical: ClassVar[bool] = False
    """True if its nodes and GPUs exist only for Ray, on one machine; the launcher starts as many as the run needs."""
    forks_workers: ClassVar[bool] = True
    """True if workers are forked from a process that has imported their engine, unless the config says otherwise."""
    kernels: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    """Kernels that compute on it: the type of its `torch.device`."""
    process_group_backend: ClassVar[str] = "gloo"
    """Backend for `torch.distributed.init_process_group`."""
    pins_host_memory: ClassVar[bool] = False
    """True if copies from pinned host memory are faster."""

    def at(self, index: int) -> Self:
        """Return the device of this kind at another position among those that the process sees."""
        return replace(self, index=index)

    @property
    def runs_on_gpus(self) -> bool:
        """Return whether kernels run on real GPUs, which a machine must have."""
        return self.has_gpus and not self.is_logical

    # The launcher's half.

    def ranks_per_node(self, cluster: ClusterSizes) -> int:
        """Ranks that a `cluster` section places on each node."""
        return cluster.gpus_per_node if self.has_gpus else cluster.cpu_ranks_per_node

    def num_gpus(self, num_ranks: int) -> int:
        """GPUs that a process which drives these ranks requests from Ray."""
        return num_ranks if self.has_gpus else 0

    def gpu_share(self, num_processes: int) -> float:
        """Return the share of a GPU that each of its processes requests from Ray."""
        # Ray rounds up to ten-thousandths, and the sum of the shares must not exceed the GPU.
        return self.num_gpus(1) * (10_000 // num_processes) / 10_000

    def bundle(self, num_ranks: int) -> dict[str, float]:
        """Ray resources of a bundle for these ranks; a byte of memory for none, as Ray has no empty bundles."""
        if not num_ranks:
            return {"memory": 1}
        return {"GPU": num_ranks, "CPU": num_ranks} if self.has_gpus else {"CPU": num_ranks}

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        """Environment variables of a process that computes with this many CPU threads; those that the user set stay."""
        return {}

    def allocator_variables(self, *, shares_memory: bool) -> Mapping[str, str]:
        """Environment variables that choose how torch allocates the memory of a rank of a model; those that the user
        set win.

        Args:
            shares_memory: True if another process maps memory of the rank.
        """
        return {}

    # The half of the process that computes.

    def claim(self, gpus: Sequence[str]) -> None:
        """Limit this process, and those it starts, to these GPUs, in this order; none means all that it sees.

        Called before torch or an engine initialises the device. Does nothing on a device without GPUs.
        """
        if self.has_gpus and gpus:
            os.environ[VISIBLE] = ",".join(gpus)

    def visible(self) -> tuple[str, ...]:
        """Return the GPUs that this process sees, as `CUDA_VISIBLE_DEVICES` lists them (indices or UUIDs)."""
        return listed(os.environ.get(VISIBLE, ""))

    @property
    def torch_device(self) -> torch.device:
        """The `torch.device` of this device."""
        import torch

        return torch.device(self.kernels, self.index) if self.kernels != "cpu" else torch.device("cpu")

    @property
    def memory_id(self) -> str:
        """Identifies the memory that processes share through it: equal for two processes that can map each other's
        buffers."""
        return ""

    @property
    def chip(self) -> str:
        """Name of the model of its chip, empty if it is unknown: "NVIDIA H100 80GB HBM3"."""
        return ""

    def activate(self) -> None:
        """Make it the process's current device."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor takes memory that its tenants must leave to one another."""
        return False

    def synchronize(self) -> None:
        """Wait until the work that this thread has given it so far, on its current stream, is done."""

    def release_memory(self) -> None:
        """Give freed memory back, to the other processes on the device."""

    def memory_bytes(self) -> int:
        """Memory that this process uses: of the device if it has its own, else of the host."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def memory(self) -> DeviceMemory | None:
        """Measure the memory of the device itself; None if it has none of its own."""
        return None

    def reset_peak(self) -> None:
        """Start a new measurement of `peak_bytes`."""
        # Some containers do not let a process write this file; its peak is then of its whole life.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the maximum of `memory_bytes` since `reset_peak`."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def rng_state(self) -> dict[str, Any]:
        """State of torch's random generators, the host's among them."""
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `rng_state` returned; a state that another kind of device left out is not touched."""
        import torch

        torch.set_rng_state(state["cpu"])


def listed(gpus: str) -> tuple[str, ...]:
    """Return the GPUs of a list like that in `CUDA_VISIBLE_DEVICES`."""
    return tuple(gpu.strip() for gpu in gpus.split(",") if gpu.strip())


def node_address() -> str:
    """Return the address of this process's node as other nodes reach it; loopback outside a worker."""
    return os.environ.get(NODE_ADDRESS) or LOOPBACK


def hold_port() -> socket.socket:
    """Return a socket that keeps a port of the node's address for this process until it is closed.

    It is bound and never listens: no other process gets the port, while a listener that reuses addresses, as
    `torch.distributed` and `socket.create_server` make it, can be opened on it.
    """
    address = node_address()
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held
