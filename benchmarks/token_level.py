"""Cost of recording values of tokens (`logger.token_level`) in a GRPO step, next to steps that record none.

    python benchmarks/token_level.py [--tokens 1024] [--rounds 8] [--wait 0 2]

The driver's side is the product's own, on simulated workers, as in `driver.py`. The workers compute nothing, so that a
step is as short as it can be, and the cost as large a share of it as it can be; with `--wait` the driver also waits in
each step, as it does for devices that compute. One run makes blocks of steps that record nothing, the tokens of one
sampled group, and the tokens of all rollouts, in turn; a ratio compares a block with the one of the same round that
records nothing. The first steps of a block are not counted, because files are written while the following steps run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from driver import STEP, MeasuredRun, measured_steps
from measurement import surroundings, table

from rl_core.data.batch import Batch
from rl_core.devices import device_named
from rl_core.rollouts.group import RolloutGroup
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.run_session import RunSession
from rl_launch.run_session.rollouts.run_files import TokenFiles

LEVELS = ("none", "sampled", "all")
BLOCK, UNCOUNTED = 6, 2
"""Steps of a block, and its first ones that are not counted."""


class Words:
    """Texts of about the length of an English token."""

    def text(self, number: int) -> bytes:
        """Return a word that differs by token."""
        return b"w%d " % number

    def is_special(self, number: int) -> bool:
        """Return False: no token is special."""
        return False


class PairedRun(MeasuredRun):
    """A run whose blocks of steps record tokens at different levels; the first step belongs to none.

    Args:
        session: Session that records one sampled group.
        folder: Folder of the rollouts.
        wait: Seconds for which the driver waits in each training phase.
    """

    def __init__(self, session: RunSession, folder: Path, wait: float) -> None:
        super().__init__(session)
        self._wait = wait
        session.read_token_texts_from(Words())
        self.all = TokenFiles(folder, "all", 1)
        self.all.read_texts_from(Words())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See the session."""
        with super().phase(name):
            yield
            if name == "training":
                time.sleep(self._wait)

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, batch: Batch | None = None
    ) -> None:
        """See the session; the tokens have the level of the step."""
        level = LEVELS[(step - 2) // BLOCK % len(LEVELS)] if step > 1 else "none"
        super().record_rollouts(step, groups, advantages, batch=batch if level == "sampled" else None)
        if level != "all":
            # nothing that the last block has left to write falls into the counted steps of this one
            self.all.flush()
        elif batch is not None:
            with self._timed("recording"), self._session.phase("recording"):
                self.all.append(step, groups, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step (%(default)s)")
    parser.add_argument("--group", type=int, default=16, help="rollouts per prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each rollout (%(default)s)")
    parser.add_argument(
        "--wait", type=float, nargs="+", default=[0.0, 2.0], help="seconds of waiting in a step; a table for each"
    )
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each level (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: 64 rollouts, 1 round")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.prompts, chosen.group, chosen.rounds, chosen.wait = 16, 4, 1, [0.0]
    chosen.workers, chosen.replicas, chosen.processes, chosen.together = 16, 4, 2, 4
    # a round that is not counted, in which libraries are imported
    chosen.steps = BLOCK * len(LEVELS) * (1 + chosen.rounds)
    print(surroundings("rl-algos", "rl-core", "rl-launch", "ray", "pyarrow"))
    print(
        f"{chosen.prompts * chosen.group} rollouts of {chosen.tokens} tokens a step, {chosen.rounds} rounds of blocks "
        f"of {BLOCK - UNCOUNTED} counted steps"
    )
    for wait in chosen.wait:
        with (
            tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch,
            VirtualCluster(device=device_named("cpu"), num_nodes=1, ranks_per_node=1) as cluster,
        ):
            folder = Path(scratch) / "run" / "rollouts"
            measured = partial(PairedRun, folder=folder, wait=wait)
            run = measured_steps(cluster, Path(scratch) / "run", chosen.tokens, chosen, measured)
            run.all.flush()
            run.all.close()
            waiting = f"{wait:g} s of waiting in a step" if wait else "workers that answer at once"
            print(f"\n{waiting}\n\n{costs(run)}\n\n{sizes(folder)}", flush=True)


def costs(run: PairedRun) -> str:
    """Return the table of seconds and ratios."""
    steps = run.found[BLOCK * len(LEVELS) :]
    blocks = [steps[start + UNCOUNTED : start + BLOCK] for start in range(0, len(steps), BLOCK)]
    rows = []
    for number, level in enumerate(LEVELS):
        own, bare = blocks[number :: len(LEVELS)], blocks[:: len(LEVELS)]
        cells = []
        for field in ("wall", "driver"):
            spent, reference = (
                [np.mean([getattr(step[STEP], field) for step in block]) for block in part] for part in (own, bare)
            )
            ratios = [one / other for one, other in zip(spent, reference, strict=True)]
            cells += [
                f"{1000 * median(spent):.1f}",
                f"{1000 * median(one - other for one, other in zip(spent, reference, strict=True)):.1f}",
                f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            ]
        recording = [step["recording"].wall for block in own for step in block]
        rows.append((level, *cells, f"{1000 * median(recording):.1f}"))
    head = [
        "logger.token_level",
        *(f"{name}{unit}" for name in ("wall", "driver's CPU") for unit in (", ms", ", added ms", ", ratio")),
    ]
    return table([*head, "time/recording, ms"], rows)


def sizes(folder: Path) -> str:
    """Return the bytes of a token in the files of each level."""
    import pyarrow.parquet as pq

    found: dict[int, list[int]] = {}
    for path in folder.glob("tokens_*.parquet"):
        num_tokens = pq.ParquetFile(path).metadata.num_rows
        found.setdefault(num_tokens, []).append(path.stat().st_size)
    return "\n".join(
        f"files of {num_tokens:,} tokens: {median(own) / num_tokens:.1f} bytes per token"
        for num_tokens, own in sorted(found.items())
    )


if __name__ == "__main__":
    main()
