"""Peak memory of logprobs, of activations and of what stays on the device, each in a process of its own.

    python packages/rl-dtensor/benchmarks/memory.py [logprobs] [activations] [resident]

On the CPU the resident set counts: its peak over what it was before (`VmHWM` after a reset, `VmRSS`), with an allocator
that gives what is freed back at once. On a GPU torch counts (`max_memory_allocated`). The baseline of logprobs
is what one writes without chunks: cross-entropy on whole logits.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import seconds, surroundings, table
from training import ADAMW, NextToken, Size, batch_of, config_of, in_process, one_rank, packed

from rl_core.model_config import OptimizerConfig
from rl_core.torch.heads.logprobs import Head, head_reads

MB = 10**6
HIDDEN = 64
"""Of the head: small, so that logits are what takes memory and the products take little time."""

KEEPS_NOTHING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc maps every tensor of 64 KiB or more on its own, and unmaps it when it is freed."""

HALF_STATE = OptimizerConfig(name="rl_core.torch.HalfStateAdamW", kwargs=ADAMW.kwargs)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured heads and model.

    Args:
        heads: tokens, vocabulary and chunk of each measurement of logprobs; the chunk is None for whole logits.
        model: whose activations and state are measured.
        tokens: of one microbatch of it.
    """

    heads: tuple[tuple[int, int, int | None], ...]
    model: Size
    tokens: int


FULL = Sizes(
    (
        *((tokens, 32768, None) for tokens in (1024, 2048, 4096)),
        (4096, 131072, None),
        *((tokens, 32768, 1024) for tokens in (1024, 4096, 8192)),
        *((4096, 131072, chunk) for chunk in (1024, 256)),
    ),
    Size(512, 8, 8, 2, vocab=1024, inner=1536),
    2048,
)
QUICK = Sizes(
    ((512, 16384, None), (512, 16384, 128), (1024, 16384, 128)), Size(256, 4, 4, 2, vocab=512, inner=768), 1024
)


class Memory:
    """Bytes that this process holds on a device, now and at most."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"

    def now(self) -> int:
        """Bytes held."""
        return torch.cuda.memory_allocated() if self._is_cuda else self._of_process("VmRSS")

    def forget_peak(self) -> None:
        """Count the peak from here."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Most bytes held since `forget_peak`."""
        return torch.cuda.max_memory_allocated() if self._is_cuda else self._of_process("VmHWM")

    @staticmethod
    def _of_process(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="see that it runs: smaller sizes")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}")
    print(f"{surroundings('rl-core', 'rl-dtensor', 'torch', 'transformers')}; {chosen.device}")
    print("MB are 10^6 bytes\n")

    def apart(measure: Callable[..., Any], *args: Any) -> Any:
        return in_process(with_memory, measure, chosen.device, chosen.threads, *args)

    for name in chosen.parts or PARTS:
        print(PARTS[name](QUICK if chosen.quick else FULL, chosen.device, apart))
        print(flush=True)


def logprobs(sizes: Sizes, device: str, apart: Callable[..., Any]) -> str:
    """Of a head's logprobs, forward and backward."""
    rows = []
    for tokens, vocab, chunk in sizes.heads:
        peak = apart(peak_of_head, tokens, vocab, chunk)
        existing = 4 * vocab * (tokens if chunk is None else min(chunk, tokens))
        rows.append(
            (
                "whole logits" if chunk is None else f"chunks of {chunk}",
                str(tokens),
                str(vocab),
                f"{peak / MB:.0f}",
                f"{existing / MB:.0f}",
                f"{peak / existing:.1f}",
            )
        )
    head = ["logprobs and their gradients", "tokens", "vocabulary", "peak, MB", "its logits, MB", "peak / logits"]
    return f"Head of {HIDDEN} dimensions, float32, gradients of head and hidden states left out\n\n{table(head, rows)}"


def peak_of_head(memory: Memory, device: str, tokens: int, vocab: int, chunk: int | None) -> int:
    """Bytes over those of inputs and gradients."""
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), device=device)
    gradients = hidden.nbytes + weight.nbytes
    warm = torch.zeros(16, HIDDEN, device=device, requires_grad=True)
    F.linear(warm, torch.ones(64, HIDDEN, device=device)).log_softmax(-1).sum().backward()
    memory.forget_peak()
    before = memory.now()
    if chunk is None:
        F.cross_entropy(F.linear(hidden, weight), targets).backward()
    else:
        head_reads(hidden, Head(weight), targets, chunk_size=chunk).logprobs.mean().backward()
    return memory.peak() - before - gradients


def activations(sizes: Sizes, device: str, apart: Callable[..., Any]) -> str:
    """Of a training step, by what is computed again."""
    kinds: dict[str, dict[str, Any]] = {
        "all kept": {"recompute": "none"},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
    }
    measured = {
        (name, tokens): apart(peak_of_step, sizes.model, tokens, backend)
        for tokens in (sizes.tokens // 2, sizes.tokens)
        for name, backend in kinds.items()
    }
    rows = []
    for (name, tokens), (peak, took) in measured.items():
        all_kept, least = measured["all kept", tokens]
        rows.append(
            (name, str(tokens), f"{peak / MB:.0f}", f"{peak / all_kept:.2f}", seconds(took), f"{took / least:.2f}")
        )
    head = ["activation checkpointing", "tokens", "peak, MB", "of all kept", "s", "of all kept"]
    return f"One step of {sizes.model}, float32, one microbatch, over what stays between steps\n\n{table(head, rows)}"


def peak_of_step(memory: Memory, device: str, model: Size, tokens: int, backend: dict[str, Any]) -> tuple[int, float]:
    """Bytes over those between two steps, and seconds."""
    batch = batch_of([tokens // 4] * 4, model.vocab)
    with worker_of(model, device, tokens, backend) as worker:
        worker.train_step(batch, NextToken())  # makes the optimizer's state
        before = memory.now()
        memory.forget_peak()
        started = time.perf_counter()
        worker.train_step(batch, NextToken())
        return memory.peak() - before, time.perf_counter() - started


def resident(sizes: Sizes, device: str, apart: Callable[..., Any]) -> str:
    """A table of the memory that a worker holds between steps."""
    kinds: dict[str, tuple[dict[str, Any], OptimizerConfig]] = {
        "AdamW": ({}, ADAMW),
        "AdamW in bfloat16 (HalfStateAdamW)": ({}, HALF_STATE),
        "AdamW, cpu_offload": ({"cpu_offload": True}, ADAMW),
    }
    if device == "cpu":
        del kinds["AdamW, cpu_offload"]  # the host is where they are
    rows = []
    for name, (backend, optimizer) in kinds.items():
        held = apart(held_by_worker, sizes.model, sizes.tokens // 2, backend, optimizer)
        rows.append((name, *(f"{bytes_ / MB:.0f}" for bytes_ in held)))
    head = ["", "loaded", "after a step", "optimizer offloaded", "and parameters", "onloaded"]
    note = "On the CPU an offload leaves everything where it is: the host is where it would go.\n\n"
    what = f"{sizes.model}, float32, a step of {sizes.tokens // 2} tokens; MB over those before it was built"
    return f"{what}\n\n{note if device == 'cpu' else ''}{table(head, rows)}"


def held_by_worker(
    memory: Memory, device: str, model: Size, tokens: int, backend: dict[str, Any], optimizer: OptimizerConfig
) -> list[int]:
    """Bytes after loading, a step, the offload of the optimizer and then of the parameters, and the return of both."""
    batch = batch_of([tokens // 4] * 4, model.vocab)
    before = memory.now()
    with worker_of(model, device, tokens, backend, optimizer=optimizer) as worker:
        held = [memory.now()]
        worker.train_step(batch, NextToken())
        held.append(memory.now())
        worker.offload(["optimizer"])
        held.append(memory.now())
        worker.offload(["parameters"])
        held.append(memory.now())
        worker.onload()
        held.append(memory.now())
        worker.train_step(batch, NextToken())
        return [bytes_ - before for bytes_ in held]


@contextmanager
def worker_of(model: Size, device: str, max_tokens: int, backend: dict[str, Any], **settings: Any) -> Iterator[Any]:
    """One rank that trains on packed rows."""
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = model.write(Path(scratch))
        config = config_of(folder, max_tokens, **packed(max_tokens), logprob_chunk_size=256, **settings)
        with one_rank(config, device, **backend) as worker:
            yield worker


def with_memory(measure: Callable[..., Any], device: str, threads: int, *args: Any) -> Any:
    """Call a function that measures, with the memory of this process."""
    torch.set_num_threads(threads)
    return measure(Memory(device), device, *args)


PARTS = {"logprobs": logprobs, "activations": activations, "resident": resident}

if __name__ == "__main__":
    os.environ.update(KEEPS_NOTHING)
    main()
