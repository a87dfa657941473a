"""Actions of the ranks of a pool, of which some fail."""

import threading
import time
from datetime import timedelta
from pathlib import Path

from joined_rank import joined
from torch.distributed.distributed_c10d import _set_pg_timeout

from rl_core.errors import RLError
from rl_core.model import SavedFile
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.process_group import on_all_ranks, on_rank0
from rl_core.torch.training.checkpoint_files import BackgroundSave

FILE = SavedFile("weights", 8, None, 0)


def work(rank: Rank, run: str, failing: int | None) -> tuple[list[str], str]:
    """The actions of this rank and the error that it raised, if the given rank fails."""
    done: list[str] = []

    def action() -> None:
        if rank.rendezvous.rank == failing:
            raise FileNotFoundError("no such shelf")
        done.append("worked")

    with joined(rank) as group:
        try:
            {"on_rank0": on_rank0, "on_all_ranks": on_all_ranks}[run](group, action)
        except (RLError, FileNotFoundError) as error:
            return done, f"{type(error).__name__}: {error}"
    return done, ""


def wait(rank: Rank) -> list[str]:
    """The actions of this rank, if rank 0 takes longer than a collective may."""
    done: list[str] = []

    def action() -> None:
        time.sleep(1.0)
        done.append("worked")

    with joined(rank) as group:
        _set_pg_timeout(timedelta(milliseconds=100), group)
        on_rank0(group, action)
        on_all_ranks(group, action if rank.rendezvous.rank == 0 else lambda: None)
    return done


def write(rank: Rank, fails: bool) -> list[object]:
    """The answers of a background save: before anything, while writing, after, and after that."""
    with joined(rank):
        background = BackgroundSave()
        said: list[object] = [background.finish(wait=False)]
        gate = threading.Event()
        assert background.group is background.group

        def written() -> tuple[SavedFile, ...]:
            gate.wait(60)
            if fails:
                raise OSError(28, "No space left on device")
            return (FILE,)

        background.begin(Path("step_3"), written, wait=False)
        said.append(background.finish(wait=False))
        gate.set()
        try:
            said.append(background.finish())
        except RLError as error:
            said.append(str(error))
        said.append(background.finish())
        background.close()
        return said
