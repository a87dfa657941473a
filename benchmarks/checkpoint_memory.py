"""Memory and seconds of a checkpoint of a model on four ranks: saved at once, saved behind the steps, and read again.

    python benchmarks/checkpoint_memory.py [--backends dtensor megatron]

Real Ray, gloo and the product's own run session; every rank is a process, on CPU and in float32 with AdamW, so that a
parameter has 12 bytes of state. Memory is each process's high-water mark of resident memory (`VmHWM`), reset before and
given as the growth over the process's memory after training and before the first save, beside the size of the files:
memory that an allocator keeps from one phase is in the next one's figure too. SHA-256 in the driver's process is
counted byte by byte, and so are its reads (`rchar`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measurement import num_parameters, seconds, surroundings, table

from rl_algos.losses.tokens import NLLLoss
from rl_algos.tiny_model import make_tiny_model
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.model import ModelSpec
from rl_core.ray.model import RemoteModel
from rl_launch.backends import Backends
from rl_launch.root_config import POLICY
from rl_launch.run_config.reading import read_model_plan
from rl_launch.run_session.checkpoints.checkpoints import Checkpoints
from rl_launch.run_session.config import CheckpointingConfig

NUM_RANKS = 4
LAYOUTS: Mapping[str, dict[str, int]] = {"dtensor": {}, "megatron": {"tensor_model_parallel_size": 2}}
"""Settings of each backend: FSDP2 over four ranks, and tensor parallelism of two by two data-parallel ranks."""
MEGABYTE = 10**6


@dataclass(frozen=True)
class Measured:
    """The time of a phase, and its memory, digests and reads by process.

    Args:
        ranks, driver: growth of the high-water mark in bytes, of the ranks the largest.
        hashed, read: bytes that the driver digested and read.
    """

    name: str
    took: float
    ranks: int
    driver: int
    hashed: int
    read: int

    def row(self) -> list[str]:
        """Return a row of the table."""
        return [
            self.name,
            seconds(self.took),
            *(f"{value / MEGABYTE:.1f}" for value in (self.ranks, self.driver, self.read)),
            str(self.hashed),
        ]


class CountedHash:
    """Stands for `hashlib.sha256` in this process and counts the digested bytes."""

    total = 0

    def __init__(self, data: Any = b"", **settings: Any) -> None:
        self._hash = _sha256(**settings)
        self.update(data)

    def update(self, data: Any) -> None:
        """See `update` of hashlib."""
        CountedHash.total += memoryview(data).nbytes
        self._hash.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hash, name)


_sha256 = hashlib.sha256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=sorted(LAYOUTS), default=sorted(LAYOUTS))
    parser.add_argument("--layers", type=int, default=21, help="number of layers of 9.4M parameters (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder to write into (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="test run: one layer of a hidden size of 128")
    chosen = parser.parse_args()
    print(surroundings("rl-launch", "torch", "ray"), "\n")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        sizes = (128, 1, 4) if chosen.quick else (1024, chosen.layers, 16)
        hidden_size, num_layers, num_heads = sizes
        make_tiny_model(
            folder / "model",
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_key_value_heads=num_heads // 2,
        )
        size = num_parameters(folder / "model")
        print(
            f"{size / 1e6:.1f}M parameters on {NUM_RANKS} ranks: {4 * size / MEGABYTE:.0f} MB of weights, "
            f"{12 * size / MEGABYTE:.0f} MB of state in all, {12 * size / NUM_RANKS / MEGABYTE:.0f} MB a rank"
        )
        hashlib.sha256 = CountedHash  # type: ignore[assignment,misc]  # to check that nothing large passes through it
        for backend in chosen.backends:
            print(f"\n{backend}\n")
            print(measured(folder, backend), flush=True)


def measured(folder: Path, backend: str) -> str:
    """Return the table of one backend, and the bytes that its ranks wrote."""
    checkpoints = Checkpoints(folder / backend, CheckpointingConfig())
    (folder / backend).mkdir()
    rows: list[Measured] = []
    with model_of(folder, backend) as model:
        model.train_step(batch(), NLLLoss())
        models = {"policy": model}
        measure = Meter([report["pid"] for report in model.health()])
        # makes process groups and imports
        rows.append(measure("first save", lambda: checkpoints.save(1, models=models, state={}, metrics={})))
        rows.append(measure("save, waited for", lambda: checkpoints.save(2, models=models, state={}, metrics={})))
        files = model.finish_save() or ()
        rows.append(
            measure("async_save: the step waits", lambda: checkpoints.begin(3, models=models, state={}, metrics={}))
        )
        rows.append(measure("async_save: behind the steps", checkpoints.finish))
        rows.append(measure("a second start: is it whole", checkpoints.newest))
        path = folder / backend / "step_3"
        rows.append(measure("restore, verified", lambda: checkpoints.restore(path, models=models, state={})))
        export = measure("of a save, the export for transformers", lambda: model.export(str(folder / "export")))
    digesting = digest_all(path / "policy")
    written = [sum(file.size for file in files if file.rank == rank) for rank in range(NUM_RANKS)]
    head = ["", "s", "largest rank +MB", "driver +MB", "driver reads MB", "driver digests B"]
    said = (
        f"Each rank wrote {', '.join(f'{size / MEGABYTE:.0f}' for size in written)} MB. "
        f"One process that reads and digests them all, as the driver would, takes {seconds(digesting)} s."
    )
    return f"{table(head, [*(each.row() for each in rows), export.row()])}\n\n{said}"


class Meter:
    """Measures phases in this process and the ranks'."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._held = [status(pid, "VmRSS") for pid in (*self._ranks, os.getpid())]

    def __call__(self, name: str, work: Callable[[], object]) -> Measured:
        """Run `work` as the phase of this name."""
        everyone = [*self._ranks, os.getpid()]
        for pid in everyone:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        hashed, read, started = CountedHash.total, read_bytes(), time.perf_counter()
        work()
        took = time.perf_counter() - started
        *ranks, driver = (status(pid, "VmHWM") - held for pid, held in zip(everyone, self._held, strict=True))
        return Measured(name, took, max(ranks), driver, CountedHash.total - hashed, read_bytes() - read)


@contextmanager
def model_of(folder: Path, backend: str) -> Iterator[RemoteModel]:
    """Yield the model on four ranks of its own Ray, with an optimizer."""
    section = {"enabled": True, **LAYOUTS[backend]}
    plan = read_model_plan(
        {
            "policy": {
                "model_name": str(folder / "model"),
                "precision": "float32",
                "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5}},
                f"{backend}_cfg": section,
            },
            "cluster": {"device": "cpu", "cpu_ranks_per_node": NUM_RANKS, "worker_envs": "shared"},
        }
    )
    # Ray takes a second to import, which --help need not wait for
    from rl_launch.cluster.device import resolve_device
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.processes import provision_workers
    from rl_launch.runtime.runtime import Runtime

    plan = replace(plan, backends=Backends({POLICY: replace(plan.backends.models[POLICY], spec=ModelSpec())}))
    device = resolve_device(plan.config.cluster)
    envs = provision_workers(plan, None, device)
    logs = folder / f"{backend}-logs"
    logs.mkdir()
    with VirtualCluster.of(plan.config.cluster, device) as cluster, Runtime(plan, envs, cluster, logs) as runtime:
        yield runtime.models()[POLICY]


def batch() -> Batch:
    """Return eight short rows."""
    tokens = Ragged.from_rows([np.arange(1, 9, dtype=np.int32)] * 8, dtype=np.int32)
    mask = np.tile(np.array([0, *[1] * 7], np.uint8), 8)
    return Batch({TOKENS: tokens, "loss_mask": tokens.like(mask)})


def status(pid: int, name: str) -> int:
    """Return a number of `/proc/PID/status`, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def read_bytes() -> int:
    """Return the bytes that this process has read so far, from files and sockets."""
    return int(Path("/proc/self/io").read_text().split()[1])


def digest_all(folder: Path) -> float:
    """Return the seconds of reading and digesting all files of a folder in one thread."""
    started = time.perf_counter()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, _sha256)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
