"""Weights that a config ties and the files hold apart."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rl_core.facts.hf_config import HFConfig
from rl_core.torch.files.model_files import OpenWeights, WeightFiles
from rl_core.torch.process_group import on_all_ranks

READ_BYTES = 2**26
"""Bytes of a weight that are compared at one time."""

_logger = logging.getLogger(__name__)


def untie_apart(
    config: HFConfig, pairs: Sequence[tuple[str, str]], files: WeightFiles, group: dist.ProcessGroup
) -> bool:
    """Set `tie_word_embeddings` of a `transformers` config to false if the files hold other values under two names that
    it ties, as `transformers` does when it loads them; collective.

    Args:
        config: Config of the model; changed in place.
        pairs: Tied tensors, by name in the files.
        files: Weight files that the model is loaded from.
        group: All ranks; each compares its share of the rows.

    Returns:
        Whether it was set, so that the model is to be built again.
    """
    stored = [pair for pair in pairs if files.names.issuperset(pair)]
    if not stored:
        return False
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    differ = torch.zeros(len(stored), dtype=torch.int32)

    def compare() -> None:
        with files.open() as opened:
            for place, (first, second) in enumerate(stored):
                differ[place] = weights_differ(opened, first, second, rank, size)

    on_all_ranks(group, compare)
    dist.all_reduce(differ, op=dist.ReduceOp.MAX, group=group)
    apart = [" and ".join(pair) for pair, differs in zip(stored, differ.tolist(), strict=True) if differs]
    if not apart:
        return False
    if not config.tie_word_embeddings:
        raise ValueError(
            f"{config.model_type} models have {apart[0]} as one weight, and {files.folder} holds other values under "
            "each name; save the model again with one of them"
        )
    config.tie_word_embeddings = False
    _logger.warning(
        "%s: the config ties %s, and the files hold other values under each name, so they are not tied, as in "
        "transformers; set policy.hf_config_overrides.tie_word_embeddings=false for generators that follow the config",
        files.folder,
        ", ".join(apart),
    )
    return True


def weights_differ(opened: OpenWeights, first: str, second: str, rank: int = 0, size: int = 1) -> bool:
    """Return whether two weights differ in a rank's share of their rows, or in shape."""
    shape = opened.shape(first)
    if shape != opened.shape(second):
        return True
    num_rows = shape[0]
    step = max(1, READ_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
    stop = num_rows * (rank + 1) // size
    for start in range(num_rows * rank // size, stop, step):
        rows = (slice(start, min(start + step, stop)),)
        one, other = (opened.read(name, rows).float() for name in (first, second))
        if not torch.equal(one, other):
            return True
    return False
