"""The differences between the devices that are checked."""

from __future__ import annotations

import gc
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.devices import Device

OURS = ("rl_core", "rl_dtensor", "rl_megatron")
"""Packages to whose lines a wait is attributed."""

BETWEEN = ("gpu_check", "torch/_dynamo/", "torch/utils/_python_dispatch")
"""Files that are on the stack because of the measurement."""

_aten = torch.ops.aten


class Accelerator(ABC):
    """A device, as its memory and its waits are measured.

    Args:
        kind: the device that this process computes on.
    """

    measures_memory: bool

    def __init__(self, kind: Device) -> None:
        self.kind = kind

    @staticmethod
    def problem() -> str:
        """Return why the check cannot run here; empty if it can."""
        return ""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work on the device."""

    @abstractmethod
    def used_bytes(self, *, trims: bool = True) -> int:
        """Return the device memory in use by all processes, as the driver counts it; 0 if the device has none of its
        own.

        Args:
            trims: give back what this process has cached first.
        """

    @abstractmethod
    def total_bytes(self) -> int:
        """Return the device's memory; 0 if it has none of its own."""

    @abstractmethod
    def restart_peak(self) -> int:
        """Start to measure the peak; returns the bytes held now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the maximum number of bytes that tensors of this process have held since `restart_peak`."""

    @abstractmethod
    def waits(self) -> AbstractContextManager[Counter[str]]:
        """Count, by place, how often the host waits for the device."""

    def release(self) -> None:
        """Give back cached memory."""
        gc.collect()
        self.kind.release_memory()


class HostAccelerator(Accelerator):
    """The CPU, whose memory is not measured by owner; a wait is recognised by its operation."""

    measures_memory = False

    def synchronize(self) -> None:
        """Return at once: nothing is pending."""

    def used_bytes(self, *, trims: bool = True) -> int:
        return 0

    def total_bytes(self) -> int:
        return 0

    def restart_peak(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    @contextmanager
    def waits(self) -> Iterator[Counter[str]]:
        found: Counter[str] = Counter()
        with _HostReads(found):
            yield found


class CudaAccelerator(Accelerator):
    """The one GPU that this process sees."""

    measures_memory = True

    def __init__(self, kind: Device) -> None:
        super().__init__(kind)
        kind.activate()

    @staticmethod
    def problem() -> str:
        return "" if torch.cuda.is_available() else "torch sees no GPU here; --device cpu runs without one"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.kind.torch_device)

    def used_bytes(self, *, trims: bool = True) -> int:
        self.synchronize()
        if trims:
            self.release()
        free, total = torch.cuda.mem_get_info(self.kind.torch_device)
        return total - free

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.kind.torch_device)[1]

    def restart_peak(self) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.kind.torch_device)
        return torch.cuda.memory_allocated(self.kind.torch_device)

    def peak_bytes(self) -> int:
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.kind.torch_device)

    @contextmanager
    def waits(self) -> Iterator[Counter[str]]:
        found: Counter[str] = Counter()

        def note(message: Warning | str, *_: Any, **__: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                found[place()] += 1

        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(mode)


ACCELERATORS: dict[str, type[Accelerator]] = {"cpu": HostAccelerator, "cuda": CudaAccelerator}
"""Accelerators by the kernels of a device."""


class _HostReads(TorchDispatchMode):
    """Counts operations whose result the host needs before it continues."""

    WAITING = (_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default)

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WAITING:
            self._found[place()] += 1
        return func(*args, **(kwargs or {}))


def place() -> str:
    """Return the innermost line of this repository on the stack, and the line of the code beyond it that waits."""
    frames = [frame for frame in traceback.extract_stack() if not any(name in frame.filename for name in BETWEEN)]
    ours = [frame for frame in frames if set(OURS) & set(Path(frame.filename).parts)]
    if not ours:
        return f"{_short(frames[-1])} (none of our lines on the stack)" if frames else "unknown"
    inner = frames[frames.index(ours[-1]) + 1 :]
    return _short(ours[-1]) + (f" in {_short(inner[-1])}" if inner else "")


def _short(frame: traceback.FrameSummary) -> str:
    parts = Path(frame.filename).parts
    return f"{'/'.join(parts[-3:])}:{frame.lineno} {frame.name}"
