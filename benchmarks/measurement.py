"""Parts that the benchmarks share: models that stop by a known law, runs of `rl train`, and tables of results."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIAS = 6.0
"""Value of the hidden dimension by which `make_endless_model` separates the end of sequence from all other tokens."""


MODE_BIAS = 30.0
"""Value of the hidden dimensions by which `make_skewed_model` separates the end of sequence and its two modes."""


@dataclass(frozen=True)
class SkewedLengths:
    """A law of completion lengths: two geometric distributions, mixed.

    Args:
        short_mean: Mean number of tokens in the short mode.
        long_mean: Mean number of tokens in the long mode.
        long_share: Share of completions in the long mode, between 0 and 1.
    """

    short_mean: float
    long_mean: float
    long_share: float

    def share_longer(self, tokens: int) -> float:
        """Return the share of completions with more than a number of tokens."""
        short, long = (1 - 1 / mean for mean in (self.short_mean, self.long_mean))
        return (1 - self.long_share) * short**tokens + self.long_share * long**tokens

    def percentile(self, share: float) -> int:
        """Return the smallest number of tokens that at most `1 - share` of the completions exceed."""
        tokens = 0
        while self.share_longer(tokens) > 1 - share:
            tokens += 1
        return tokens


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a Qwen3 with a vocabulary of characters, as `rl_algos.tiny_model.make_tiny_model` takes them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int


def make_endless_model(folder: Path, size: ModelSize) -> None:
    """Write a tiny model whose completions always run to their limit, with any sampler and any settings.

    Systems stop by different rules, but must generate equally many tokens. So the model almost never ends: one
    hidden dimension is the same for every token and no layer adds to it, and of all rows of the (tied) head only the
    end of sequence has it with the other sign, which makes that token about e^50 times less likely than any other.
    """
    end = _make_model(folder, size)
    weights = _load(folder)
    _keep_dimensions(weights, 1)
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, -1] = BIAS
    embeddings[end, -1] = -BIAS
    _save(folder, weights)


def make_skewed_model(folder: Path, size: ModelSize, lengths: SkewedLengths) -> None:
    """Write a tiny model whose completions have random lengths of a known law, with any sampler at temperature 1.

    Three hidden dimensions are functions of the last token alone, because no layer adds to them: 1 for the tokens of
    the short mode, 1 for those of the long mode, and 1 for all, times `MODE_BIAS`. So a token is followed by one of its
    own mode, or by the end with the mode's odds. A prompt's last token is of neither mode, and the first sampled token
    draws the mode.
    """
    from transformers import AutoTokenizer

    end = _make_model(folder, size)
    weights = _load(folder)
    _keep_dimensions(weights, 3)
    embeddings = weights["model.embed_tokens.weight"]
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "1"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    tokens = [token for token in range(len(embeddings)) if token not in (end, prompt[-1])]
    long = tokens[: round(lengths.long_share * len(tokens))]
    short = tokens[len(long) :]
    embeddings[:, -3:] = (0.0, 0.0, MODE_BIAS)
    # in its own mode, a token's logit is scale x 2 MODE_BIAS^2, and the end's must differ from it as its odds ask
    scale = math.sqrt(size.hidden_size / 2) / MODE_BIAS
    for dimension, mode, mean in ((-3, short, lengths.short_mean), (-2, long, lengths.long_mean)):
        embeddings[mode, dimension] = MODE_BIAS
        embeddings[end, dimension] = MODE_BIAS + math.log(len(mode) / (mean - 1)) / (scale * MODE_BIAS)
    _save(folder, weights)


def _make_model(folder: Path, size: ModelSize) -> int:
    """Write an untrained model; returns the token that ends a sequence."""
    from rl_algos.tiny_model import make_tiny_model

    make_tiny_model(
        folder,
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        num_key_value_heads=size.num_key_value_heads,
    )
    return json.loads((folder / "config.json").read_text())["eos_token_id"]


def _keep_dimensions(weights: Mapping[str, Any], count: int) -> None:
    """Let no layer add to the last dimensions of the hidden state."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[-count:] = 0


def _load(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def _save(folder: Path, weights: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def num_parameters(folder: Path) -> int:
    """Return the number of parameters of the model in a folder."""
    return sum(weight.size for weight in _load(folder).values())


def write_sums(path: Path, count: int) -> None:
    """Write JSON lines of questions with one-digit answers, all of one length."""
    rows = [{"question": f"{i % 5}+{i // 5 % 5}=", "answer": str(i % 5 + i // 5 % 5)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums_data(path: Path, environment: str) -> dict[str, Any]:
    """Return the section `data` of a run on the questions that `write_sums` wrote.

    Args:
        environment: that scores the answers.
    """
    keys = {"input_key": "question", "output_key": "answer"}
    return {"train": {"data_path": str(path), **keys, "env_name": environment}}


def rl_command(*arguments: str, python: str | Path = sys.executable) -> list[str]:
    """Return the command `rl` of an interpreter's environment."""
    return [str(python), "-m", "rl_launch.cli", *arguments]


def run_logged(command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a file; if it fails, exit with the file's last lines."""
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})})
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{tail}")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def recorded_at(run_dir: Path, step: int) -> float:
    """Return the seconds since the epoch when a step's rollouts were written; between two such times lies one whole
    step."""
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
    """Return one line: processor, cores, Python and versions of distributions."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in distributions]
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}; " + (
        ", ".join(found)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column left-aligned, the others right-aligned."""
    lines = [head, *rows]
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "| " + " | ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)]) + " |"
    rule = "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|"
    shown = [form.format(*line) for line in lines]
    return "\n".join([shown[0], rule, *shown[1:]])


def seconds(value: float) -> str:
    """Return seconds as text with three significant digits."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
