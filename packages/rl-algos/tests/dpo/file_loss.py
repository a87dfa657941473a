"""Losses of a user's own, in a file beside the recipe."""

LOSSES = '''
from dataclasses import dataclass

from rl_core.model import LOGPROBS


@dataclass(frozen=True)
class Pairs:
    """`(d(c) - d(r) - target)^2` with `d = logp - ref`, the mean over pairs."""

    target: float = 1.0
    implementation: str = "mine.py:of_pairs"
    columns = ("pair", "is_chosen", "loss_mask", "ref_logprobs")
    reads = (LOGPROBS,)
    temperature = 1.0

    def __post_init__(self):
        if self.target < 0:
            raise ValueError(f"target must not be negative, got {self.target}")

    def totals(self, batch):
        return {"pairs": len(batch) / 2}


def of_pairs(loss, reads, rows):
    import torch
    from rl_core.torch.loss import LossSums

    mask, sign = rows["loss_mask"] > 0, 2.0 * rows["is_chosen"] - 1.0
    rewards = rows.row_sums(torch.where(mask, reads["logprobs"] - rows["ref_logprobs"], 0.0))
    margins = torch.zeros(len(rewards)).index_add(0, rows["pair"], sign * rewards)[: len(rewards) // 2]
    return LossSums({"pairs": (margins - loss.target).square().sum()})


@dataclass(frozen=True)
class Judged:
    """`-v logp`, v 1 for a good response and -1 for a bad one, the mean over responses."""

    implementation: str = "mine.py:judged"
    columns = ("loss_mask", "verdict")
    reads = (LOGPROBS,)
    temperature = 1.0

    def totals(self, batch):
        return {"responses": float(len(batch))}


def judged(loss, reads, rows):
    import torch
    from rl_core.torch.loss import LossSums

    logprobs = rows.row_sums(torch.where(rows["loss_mask"] > 0, reads["logprobs"], 0.0))
    return LossSums({"responses": ((1.0 - 2.0 * rows["verdict"]) * logprobs).sum()})


@dataclass(frozen=True)
class Margins(Pairs):
    columns = (*Pairs.columns, "margin")


@dataclass(frozen=True)
class Torn(Judged):
    columns = ("loss_mask", "verdict", "is_chosen")


@dataclass(frozen=True)
class Strange(Judged):
    columns = ("loss_mask", "advantages")


@dataclass(frozen=True)
class Hot(Judged):
    temperature = 0.5


@dataclass(frozen=True)
class Uncounted(Judged):
    def totals(self, batch):
        return {"responses": float(len(batch)), "tokens": 1.0}


class Plain:
    pass
'''


def path_of(folder, name):
    """The path of one of these classes, in a file in this folder."""
    (folder / "mine.py").write_text(LOSSES)
    return f"{folder}/mine.py:{name}"
