"""Memory of the driver and of Ray's object store in GRPO steps whose prompts all have pictures of their own.

    python benchmarks/image_memory.py [--images 2500 5000 10000] [--pixels 224]

Every number of pictures is a process of its own, once with pictures and once with text of as many tokens instead, which
shows what the rows cost without them. Data, prompts, batches, records and the GRPO loop are the product's own, as in
`driver.py`, and so are its workers, which compute nothing. All rollouts of a step are held at once when it is recorded.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from driver import MeasuredRun, measured_steps
from measurement import surroundings, table

from rl_algos.data.examples import load_examples
from rl_algos.data.prompts import prompt_stream
from rl_algos.data.stream import Stream
from rl_algos.tokenizer import load_tokenizer
from rl_core.data.batch import Batch
from rl_core.devices import device_named
from rl_core.rollouts.group import RolloutGroup
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.model_files.local_models import tiny_vision_model
from rl_launch.run_config.reading import read_plan

MIB = 2**20
SIDE = 28
"""Pixels of a side of a token."""
STEPS = 1
"""Steps after the first."""


@dataclass(frozen=True)
class Use:
    """Memory of the driver's process and bytes in the object store, at one moment."""

    driver: int
    store: int

    @classmethod
    def now(cls) -> Use:
        return cls(psutil.Process().memory_info().rss, store_bytes())


class WatchedRun(MeasuredRun):
    """A run session that notes the use of memory with all rollouts of a step in flight."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.uses: list[Use] = []
        self.num_images = 0

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, batch: Batch | None = None
    ) -> None:
        """See the session."""
        self.uses.append(Use.now())
        super().record_rollouts(step, groups, advantages, batch=batch)
        self.num_images = len(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[2500, 5000, 10000], help="pictures (%(default)s)")
    parser.add_argument("--pixels", type=int, default=224, help="of a side of a picture (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="see that it runs: 40 pictures")
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "N"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure is not None:
        print(json.dumps(measure(Path(chosen.measure[0]), int(chosen.measure[1]))))
        return
    if chosen.quick:
        chosen.images = [40]
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = Path(scratch)
        total = write_pictures(folder, max(chosen.images), chosen.pixels)
        each = total / max(chosen.images)
        print(surroundings("rl-algos", "rl-core", "rl-launch", "ray"))
        print(
            f"pictures of {chosen.pixels} x {chosen.pixels} pixels, files of {each / 1024:.0f} KiB and "
            f"{tokens_of(chosen.pixels)} tokens each; MiB\n"
        )
        found = [row for count in chosen.images for row in rows(folder, count, each, chosen.pixels)]
        print(table(HEAD, found))


HEAD = (
    "prompts of a step", "files", "pixels in float32", "driver at start", "data loaded", "in flight", "a step later",
    "object store in flight", "a step later",
)  # fmt: skip


def rows(folder: Path, count: int, each: float, pixels: int) -> list[tuple[str, ...]]:
    """Return the rows of the table: the same number of prompts with pictures and without."""
    found = []
    for kind in ("pictures", "text"):
        file = folder / f"{kind}_{count}.jsonl"
        write_rows(file, kind, count, tokens_of(pixels))
        environ = {**os.environ, "RL_IMAGES": str(folder / f"store_{kind}_{count}")}
        command = [sys.executable, __file__, "--measure", str(file), str(count)]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        values = json.loads(done.stdout.splitlines()[-1])
        # patches of two equal frames, as the model's processor makes them
        sizes = (count * each, count * pixels**2 * 3 * 2 * 4) if kind == "pictures" else (0, 0)
        found.append((f"{count:,} of {kind}", *(f"{size / MIB:,.0f}" for size in (*sizes, *values))))
    return found


def measure(file: Path, count: int) -> list[int]:
    """Return the bytes of the driver at its start, with its data and in the last two steps, and the bytes of the object
    store."""
    chosen = argparse.Namespace(workers=16, replicas=4, processes=1, together=64, prompts=count, group=1, steps=STEPS)
    config: Any = read_plan(
        "grpo-clevr-count-tiny",
        [
            f"data.train={{data_path: {file}, image_folder: {file.parent}, env_name: math}}",
            "data.validation=null",
            "policy.max_total_sequence_length=256",
        ],
    ).config
    tokenizer = load_tokenizer(config.policy.tokenizer, str(tiny_vision_model()), config.policy.vision)
    with VirtualCluster(device=device_named("cpu"), num_nodes=1, ranks_per_node=1) as cluster:
        start = Use.now()
        stream = prompt_stream(load_examples(config).train, config.data, tokenizer, max_tokens=200, seed=0)
        assert isinstance(stream, Stream)
        loaded = Use.now()
        run = measured_steps(cluster, file.with_suffix(".run"), 16, chosen, WatchedRun, stream)
    assert run.num_images == count
    *_, before, last = run.uses
    return [start.driver, loaded.driver, before.driver, last.driver, before.store, last.store]


def store_bytes() -> int:
    """Return the bytes that objects take in Ray's store."""
    from ray._private.internal_api import node_stats

    [node] = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


def tokens_of(pixels: int) -> int:
    """Return the tokens of a square picture in the tiny model."""
    return (pixels // SIDE) ** 2


def write_pictures(folder: Path, count: int, pixels: int) -> int:
    """Write JPEG files of noise; return their bytes."""
    from PIL import Image

    random = np.random.default_rng(0)
    total = 0
    for index in range(count):
        file = io.BytesIO()
        Image.fromarray(random.integers(256, size=(pixels, pixels, 3), dtype=np.uint8)).save(file, "JPEG")
        (folder / f"{index}.jpg").write_bytes(file.getvalue())
        total += file.tell()
    return total


def write_rows(file: Path, kind: str, count: int, num_tokens: int) -> None:
    """Write questions about pictures, or the same with text of as many tokens: one token a character."""
    with file.open("w") as lines:
        for index in range(count):
            row: dict[str, Any] = {"answer": "1"}
            if kind == "pictures":
                row |= {"prompt": f"<image>How many in {index}?", "images": [f"{index}.jpg"]}
            else:
                row |= {"prompt": "a" * num_tokens + f"How many in {index}?"}
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
