"""Runs sections in a process of their own, which ends with a section that fails or takes too long."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from gpu_check.report import RUNS, Begun, Entry, Finding, Report, failure_of
from gpu_check.setup import Setup

WHOLE = "all of it"
STACKS = signal.SIGUSR1
"""Signal at which a section's process writes its stacks: in its own threads, as another thread's frames change while
they are read."""
STACKS_S = 2.0
"""Seconds that a process over its budget has to write its stacks."""


@dataclass(frozen=True)
class Section:
    """A part of the check.

    Args:
        function: `"module:function"`, called with a `Setup` and a `Report`.
        about: one sentence.
        needs: modules without which it is skipped.
        spoils: whether its process cannot run another section after it.
        budget_s: Seconds that it may take.
        takes_all_gpus: True for a process of its own that sees all GPUs of the check instead of the first.
    """

    function: str
    about: str
    needs: tuple[str, ...] = ("torch",)
    spoils: bool = False
    budget_s: float = 150.0
    takes_all_gpus: bool = False


DTENSOR = ("torch", "transformers", "safetensors", "peft", "rl_dtensor.worker")

SECTIONS = {
    "environment": Section("gpu_check.environment:check", "The machine, and speeds to compare the figures below with."),
    "attention": Section(
        "gpu_check.attention:check",
        "Every attention backend of rl-dtensor on rows of mixed lengths, forward and backward.",
        DTENSOR,
        budget_s=400.0,  # flex compiles each case
    ),
    "kernels": Section(
        "gpu_check.kernels:check",
        "Fused kernels, casts to 8 bits and digests against their formulas, and how fast they move their bytes.",
    ),
    "head": Section("gpu_check.head:check", "Logprobs and entropy of a large vocabulary, and their memory by chunk."),
    "training": Section(
        "gpu_check.training:check",
        "A step of rl-dtensor's worker: its loss, gradient, speed, graphs, and memory beside its plan.",
        DTENSOR,
    ),
    "float8": Section(
        "gpu_check.float8:check",
        "Linear layers of rl-dtensor in float8: products, gradients, speed and steps by recipe.",
        DTENSOR,
    ),
    "syncs": Section(
        "gpu_check.syncs:check", "Places at which the host waits for the device during a training step.", DTENSOR
    ),
    "residency": Section(
        "gpu_check.residency:check", "A worker that leaves its device and comes back, many times.", DTENSOR
    ),
    "transfer": Section(
        "gpu_check.transfer:check",
        "Weights on their way from a training worker to a generator in another process.",
        DTENSOR,
    ),
    "generator": Section(
        "gpu_check.generator:check", "The `hf` generator: its tokens, logprobs, speed and sleep.", DTENSOR
    ),
    "engine": Section(
        "gpu_check.engine:check",
        "vLLM and a worker on the same device: memory at the start, weight transfers, logprobs, sleep and waking.",
        ("torch", "transformers", "safetensors", "rl_dtensor.worker", "vllm", "rl_vllm.generator"),
        spoils=True,
        budget_s=300.0,
    ),
    "quantised": Section(
        "gpu_check.quantised:check",
        "vLLM with weights in 8 bits: versions of a worker's weights, quantised again and verified, and its speed.",
        ("torch", "transformers", "safetensors", "rl_dtensor.worker", "vllm", "rl_vllm.generator"),
        spoils=True,
        budget_s=900.0,  # an engine for each method
    ),
    "servers": Section(
        "gpu_check.servers:check",
        "HTTP servers of vLLM and SGLang as generators: versions of weights, logprobs, seeds and interruption.",
        ("torch", "transformers", "safetensors", "aiohttp", "rl_algos.torch.server_generator"),
        budget_s=900.0,  # two servers start
    ),
    "resume": Section("gpu_check.resume:check", "A checkpoint, restored in another worker.", DTENSOR),
    "forks": Section("gpu_check.forks:check", "Workers that a fork server starts, on this device.", DTENSOR),
    "megatron": Section(
        "gpu_check.megatron:check",
        "rl-megatron's worker: training, residency and checkpoints on local layers, and on Transformer Engine's.",
        ("torch", "transformers", "safetensors", "psutil", "megatron.core", "rl_megatron.worker"),
        spoils=True,
    ),
    "train": Section(
        "gpu_check.train:check",
        "`rl train grpo-math-1b` for three steps on a random model, with its profiles: Ray, vLLM and all the rest.",
        (*DTENSOR, "ray", "vllm", "rl_launch.cli"),
        budget_s=450.0,
    ),
    "meshes": Section(
        "gpu_check.meshes:check",
        "Steps of both backends on several GPUs against float64 in one process: every kind of mesh, experts, adapters "
        "and compiled layers. Needs --gpus 2 or more.",
        ("torch", "transformers", "safetensors", "peft"),
        spoils=True,
        takes_all_gpus=True,
    ),
}


class Runner:
    """A process that runs one section after another, replaced after one that fails.

    Args:
        setup: Setup of all sections.
        context: Starts the process.
    """

    def __init__(self, setup: Setup, context: BaseContext | None = None) -> None:
        self._setup = setup
        self._context = context or multiprocessing.get_context("spawn")
        self._process: BaseProcess | None = None
        self._stacks = setup.workspace / "stacks"

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, section: Section, budget_s: float) -> list[Entry]:
        """Return all findings of a section, and its failure if there was one."""
        if budget_s <= 0:
            return [Finding(WHOLE, RUNS, "failed", "not started: the time of --total is used up")]
        if section.takes_all_gpus:
            self._end()
        pipe = self._start(self._setup.num_gpus if section.takes_all_gpus else 1)
        pipe.send(section)
        entries, failure = _gather(pipe, budget_s)
        if failure:
            begun = [entry.subject for entry in entries if isinstance(entry, Begun)]
            stacks = self._written_stacks()
            self._end(patience_s=0.0)
            entries.append(Finding(begun[-1] if begun else WHOLE, RUNS, "failed", failure, stacks))
        failed = any(isinstance(entry, Finding) and entry.verdict == "failed" for entry in entries)
        if failed or section.spoils:
            self._end()
        return entries

    def _start(self, num_gpus: int) -> Connection:
        if self._process is None or not self._process.is_alive():
            self._end()
            self._pipe, theirs = self._context.Pipe()
            args = (theirs, self._setup, self._stacks, num_gpus)
            # It is not a daemon, because it has children of its own.
            self._process = self._context.Process(target=_serve, args=args)  # type: ignore[attr-defined]
            self._process.start()
            theirs.close()
        return self._pipe

    def _written_stacks(self) -> str:
        """Return the stacks of the process, or its last ones if it died; empty if it does not write any in time."""
        assert self._process is not None
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid or 0, STACKS)
            self._process.join(STACKS_S)
        return self._stacks.read_text(errors="replace") if self._stacks.exists() else ""

    def _end(self, patience_s: float = 10.0) -> None:
        if self._process is None:
            return
        self._pipe.close()  # at which an idle process ends
        self._process.join(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self._process = None


def _gather(pipe: Connection, budget_s: float) -> tuple[list[Entry], str]:
    """Return all entries that a section sends until it is done, and the reason if it ended before."""
    entries: list[Entry] = []
    deadline = time.monotonic() + budget_s
    while True:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return entries, f"over its budget of {budget_s:.0f} s"
        try:
            entry = pipe.recv()
        except (EOFError, ConnectionError):
            return entries, "its process ended without a message"
        if entry is None:
            return entries, ""
        entries.append(entry)


def _serve(pipe: Connection, setup: Setup, stacks: Path, num_gpus: int) -> None:
    os.setpgid(0, 0)
    # a worker's process sees exactly one GPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(setup.num_gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:num_gpus])
    with stacks.open("a") as file:  # after a truncation, appended to from the start
        file.truncate(0)
        faulthandler.enable(file)
        faulthandler.register(STACKS, file)
        while True:
            try:
                section = pipe.recv()
            except EOFError:
                return
            file.truncate(0)
            _run(section, setup, pipe.send)
            pipe.send(None)


def _run(section: Section, setup: Setup, emit: Callable[[Entry], None]) -> None:
    missing = [name for name in section.needs if not is_importable(name)]
    if missing:
        emit(Finding(WHOLE, "", "skipped", f"{', '.join(missing)} cannot be imported"))
        return
    module, _, function = section.function.partition(":")
    try:
        getattr(importlib.import_module(module), function)(setup, Report(emit, setup.accelerator.release))
        setup.accelerator.release()
    except Exception as error:  # noqa: BLE001  # becomes a line of the report
        emit(failure_of(WHOLE, error))


def is_importable(name: str) -> bool:
    """Return whether a module is installed, and the packages that it is in."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
