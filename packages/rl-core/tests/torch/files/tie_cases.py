"""Processes of a rank pool that compare tied weights in files."""

from pathlib import Path
from types import SimpleNamespace

from joined_rank import joined

from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.files.model_files import WeightFiles, untie_apart

PAIR = ("embedding", "head")


def untie(rank: Rank, folder: Path, is_tied: bool = True) -> tuple[bool, bool]:
    """Return whether the config was changed, and what it says then."""
    config = SimpleNamespace(tie_word_embeddings=is_tied, model_type="tiny")
    with joined(rank) as group:
        changed = untie_apart(config, [PAIR], WeightFiles.of(folder), group)
    return changed, config.tie_word_embeddings
