"""Parts that the benchmarks share: models that never stop, runs of `rl train`, and tables of results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIAS = 6.0
"""Value of the hidden dimension by which `make_endless_model` separates the end of sequence from all other tokens."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a Qwen3 with a vocabulary of characters, as `rl_algos.tiny_model.make_tiny_model` takes them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int


def make_endless_model(folder: Path, size: ModelSize) -> None:
    """A tiny model whose completions always run to their limit, with any sampler and any settings.

    Systems stop by different rules, but must generate equally many tokens. So the model almost never ends: one
    hidden dimension is the same for every token and no layer adds to it, and of all rows of the (tied) head only the
    end of sequence has it with the other sign, which makes that token about e^50 times less likely than any other.
    """
    from safetensors.numpy import load_file, save_file

    from rl_algos.tiny_model import make_tiny_model

    make_tiny_model(
        folder,
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
    )
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name == "model.embed_tokens.weight":
            weight[:, -1] = BIAS
            weight[end, -1] = -BIAS
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[-1] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def num_parameters(folder: Path) -> int:
    """Number of parameters of the model in a folder, from the header of its weights."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
    return sum(_product(shape) for shape in shapes)


def write_sums(path: Path, count: int) -> None:
    """JSON lines of questions with one-digit answers, all of one length."""
    rows = [{"question": f"{i % 5}+{i // 5 % 5}=", "answer": str(i % 5 + i // 5 % 5)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums_data(path: Path, environment: str) -> dict[str, Any]:
    """The section `data` of a run on the questions that `write_sums` wrote.

    Args:
        environment: that scores the answers.
    """
    keys = {"input_key": "question", "output_key": "answer"}
    return {"train": {"data_path": str(path), **keys, "env_name": environment}}


def rl_command(*arguments: str, python: str | Path = sys.executable) -> list[str]:
    """`rl` of an interpreter's environment."""
    return [str(python), "-m", "rl_launch.cli", *arguments]


def run_logged(command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a file; if it fails, exit with the file's last lines."""
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})})
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{tail}")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def recorded_at(run_dir: Path, step: int) -> float:
    """Seconds since the epoch at which a step's rollouts were written; between two such times lies one whole step."""
    return (run_dir / "rollouts" / f"step_{step}.jsonl").stat().st_mtime


def use_cores(count: int | None) -> int:
    """Limit this process, and all it starts, to a number of cores, or to all that it may use; returns the number."""
    cores = sorted(os.sched_getaffinity(0))
    if count is not None:
        if not 1 <= count <= len(cores):
            sys.exit(f"--cores must be from 1 to the {len(cores)} this process may use, got {count}")
        os.sched_setaffinity(0, cores[:count])
    return len(os.sched_getaffinity(0))


def surroundings(*distributions: str) -> str:
    """One line: processor, cores, Python and versions of distributions."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in distributions]
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}; " + (
        ", ".join(found)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column left-aligned, the others right-aligned."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [
        "| "
        + " | ".join(
            _padded(cell, width, column) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    ]
    rule = (
        "|" + "|".join("-" * (width + 1) + ("-" if column == 0 else ":") for column, width in enumerate(widths)) + "|"
    )
    return "\n".join([texts[0], rule, *texts[1:]])


def median(values: Iterable[float]) -> float:
    """Median of at least one value."""
    return statistics.median(values)


def seconds(value: float) -> str:
    """Seconds with three significant digits."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _product(shape: Sequence[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
