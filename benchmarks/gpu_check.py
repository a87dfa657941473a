"""Checks of this repository's own code on a GPU, or on several, in under twenty minutes and without a network.

    python benchmarks/gpu_check.py > benchmarks/results/gpu_check.md
    python benchmarks/gpu_check.py --device cpu               # all of it, small, on a machine without a GPU
    python benchmarks/gpu_check.py --device rehearsal         # the same with a GPU's offload and transports
    python benchmarks/gpu_check.py --only attention head      # some sections; --list names them
    python benchmarks/gpu_check.py --gpus 4 --only meshes     # collectives: meshes of up to four GPUs
    python benchmarks/gpu_check.py --gpus 2 --device rehearsal

It needs torch, transformers, peft, safetensors, numpy, pydantic, omegaconf and PyYAML; megatron-core and psutil for the
section `megatron`; vLLM for `engine`; for `train` also Ray and what else `rl-launch` depends on.
A section whose packages are missing says so and is skipped. The packages of this repository need not be installed: they
are taken from `packages/*/src` of the checkout. For a machine without a package index, `tools/carry.py` packs what is
missing there.

Every section prints a verdict per check against a named oracle: ok, off, failed or skipped. A section that fails, ends
its process or runs over its budget is reported, and the others still run. Measurements are listed once more at the end,
next to what this chip should reach; they have no verdict. The exit code is 1 if any check is off or failed, else 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from gpu_check.uninstalled import offer

offer(sorted(Path(__file__).resolve().parents[1].glob("packages/rl-*")))

from gpu_check.accelerator import ACCELERATORS  # noqa: E402
from gpu_check.document import Document  # noqa: E402
from gpu_check.runner import SECTIONS, Runner  # noqa: E402
from gpu_check.setup import Setup  # noqa: E402

from rl_core.devices import CUDA, DEVICES, device_named  # noqa: E402

TOTAL_S = 1100.0


def main() -> int:
    chosen = parse_arguments()
    kind = device_named(chosen.device)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if problem := ACCELERATORS[kind.kernels].problem():
        sys.exit(problem)
    end = time.monotonic() + chosen.total
    names = chosen.only or list(SECTIONS)
    document = Document(sys.stdout)
    document.title(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="rl-gpu-check-", ignore_cleanup_errors=True) as folder:
        setup = Setup(chosen.device, chosen.small or not kind.runs_on_gpus, Path(folder), chosen.gpus)
        with Runner(setup) as runner:
            for name in (name for name in SECTIONS if name in names):
                started = time.monotonic()
                document.begin(name, SECTIONS[name].about)
                budget_s = min(chosen.budget or SECTIONS[name].budget_s, end - started)
                document.end(runner.run(SECTIONS[name], budget_s), time.monotonic() - started)
    document.close()
    return 0 if document.is_clean else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(DEVICES), default=CUDA.name)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, or ranks on the CPU, of meshes (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny models and few rows, as on cpu")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help="; ".join(SECTIONS))
    parser.add_argument("--budget", type=float, help="seconds of a section (its own)")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds of all of them (%(default)s)")
    parser.add_argument("--list", action="store_true", help="name the sections")
    chosen = parser.parse_args()
    if chosen.list:
        for name, section in SECTIONS.items():
            print(f"{name}: {section.about}")
        parser.exit()
    return chosen


if __name__ == "__main__":
    sys.exit(main())
