"""How the preference losses differ from the trainers of TRL on the same made-up logits, in float64.

    uv run --isolated --package rl-algos --with torch --with trl==1.16.0 benchmarks/preference_losses.py

Every loss and its gradient by the logits, in 60 ragged batches. TRL's own methods compute its side: `_compute_loss` of
its DPO and KTO trainers, and the losses of its CPO and ORPO trainers with their averages. They cast some sums to
float32, which is left out here. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import trl.trainer.dpo_trainer
from measurement import surroundings, table
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from rl_algos.dpo.algorithm import pair_columns
from rl_algos.losses.preference import (
    AOT,
    BCO,
    CPO,
    DPO,
    EXO,
    IPO,
    NCA,
    ORPO,
    SPPO,
    AddedTerm,
    APODown,
    APOZero,
    DiscoPOP,
    Hinge,
    KTOLoss,
    PreferenceLoss,
    RobustDPO,
    SimPO,
    UnpairedAOT,
)
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

BETA, VOCABULARY, MASKED = 0.3, 11, -100


class Made:
    """A batch of pairs with made-up logits.

    Args:
        seed: Seed of the batch.
        equal_chosen: True if all chosen responses have one length, with which TRL's mean likelihood over the tokens of
            a batch is the mean over responses.
    """

    def __init__(self, seed: int, *, equal_chosen: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.num_pairs = int(random.integers(1, 9))
        lengths = random.integers(3, 14, 2 * self.num_pairs)
        lengths[: self.num_pairs] = lengths[0] if equal_chosen else lengths[: self.num_pairs]
        self.lengths, width = lengths, int(lengths.max())
        shape = (2 * self.num_pairs, width)
        self.ids = torch.from_numpy(random.integers(0, VOCABULARY, shape))
        places = np.arange(width)
        is_there = places < lengths[:, None]
        masks = is_there & (places > 0) if equal_chosen else is_there & (places > 0) & (random.random(shape) < 0.7)
        masks[np.arange(len(lengths)), lengths - 1] = True
        self.is_there, self.mask = torch.from_numpy(is_there), torch.from_numpy(masks)
        # The logits at a place are of the next token.
        self.logits = torch.from_numpy(random.normal(0, 1.5, (*shape, VOCABULARY))).requires_grad_()
        moved = self.logits.detach() + torch.from_numpy(random.normal(0, 0.7, (*shape, VOCABULARY)))
        self.reference = self.logprobs_of(moved)
        self.verdicts = random.integers(0, 2, len(lengths)).astype(np.float64)
        self.kl = abs(float(random.normal()))

    def logprobs_of(self, logits: Tensor) -> Tensor:
        """Return the logprobs `[rows, width - 1]` of all tokens except the first."""
        return logits[:, :-1].log_softmax(-1).gather(-1, self.ids[:, 1:, None])[..., 0]

    def ours(self, loss: PreferenceLoss | KTOLoss) -> tuple[float, Tensor]:
        """Return the loss here, and its gradient by the logits."""
        logprobs = self.logprobs_of(self.logits)
        collision = self.logits[:, :-1].softmax(-1).square().sum(-1)
        # Here the two responses of a pair follow each other.
        order = np.arange(len(self.lengths)).reshape(2, -1).T.ravel()

        def ragged(values: Tensor, dtype: type = np.float64) -> Ragged:
            rows = [np.append(0.0, values[row, : self.lengths[row] - 1].detach().numpy()) for row in order]
            return Ragged.from_rows(rows, dtype)

        batch = Batch(
            {
                "tokens": ragged(self.ids[:, 1:], np.int32),
                "logprobs": ragged(logprobs),
                "ref_logprobs": ragged(self.reference),
                "loss_mask": ragged(self.mask[:, 1:], np.uint8),
                "pair": order % self.num_pairs,
                "is_chosen": (order < self.num_pairs).astype(np.uint8),
                "verdict": self.verdicts[order],
                "kl": np.full(len(order), self.kl),
                "row": order,
            }
        )
        if isinstance(loss, PreferenceLoss) and loss.term.uses_reference:
            own = SimpleNamespace(infer=lambda *_, **__: Batch({"logprobs": batch.ragged("logprobs")}))
            batch = pair_columns(loss, lambda given, _policy: given, batch, own)
        reads = {}
        for name, values in (("logprobs", logprobs), ("collision", collision)):
            found = [values[row, : self.lengths[row] - 1] for row in batch.array("row")]
            reads[name] = torch.cat([part for row in found for part in (row.new_zeros(1), row)])
        names = ("tokens", *loss.columns)
        columns = {name: torch.from_numpy(getattr(batch[name], "values", batch[name])) for name in names}
        rows = Rows(torch.from_numpy(batch.ragged("tokens").offsets), columns)
        value = resolve(loss.implementation)(loss, reads, rows).loss(loss.totals(batch))
        return value.item(), self._gradient(value)

    def theirs(self, compute: Callable[[Made], Tensor]) -> tuple[float, Tensor]:
        """Return the loss of TRL, and its gradient by the logits."""
        value = compute(self)
        return value.item(), self._gradient(value)

    def outputs(self, logits: Tensor) -> Any:
        """Return the outputs of TRL's fused head."""
        distribution = logits[:, :-1].softmax(-1)
        return SimpleNamespace(
            log_probs=self.logprobs_of(logits) * self.mask[:, 1:],
            log_sum_sq_probs=distribution.square().sum(-1).log(),
            # these are for its metrics
            **dict.fromkeys(("entropy", "mean_logits"), torch.zeros_like(self.reference)),
            is_top1=torch.zeros_like(self.mask[:, 1:]),
        )

    def _gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0]


@contextmanager
def in_float64() -> Iterator[None]:
    """Leave out TRL's casts to float32."""
    doubled = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    casts = mock.patch.object(Tensor, "float", lambda tensor: tensor.double())
    with casts, mock.patch.object(trl.trainer.dpo_trainer, "torch", doubled):
        yield


def trainer(**fields: Any) -> Any:
    """Return the attributes that TRL's methods read of a trainer."""
    gather = dict.fromkeys(("gather", "gather_for_metrics"), lambda value: value)
    accelerator = SimpleNamespace(device="cpu", **gather)
    model = torch.nn.Module()
    model.is_gradient_checkpointing = False
    settings = SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=fields.pop("tau", 0.05))
    given = {
        "model": model,
        "accelerator": accelerator,
        "args": settings,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "is_encoder_decoder": False,
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
        "beta": BETA,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
        "alpha": 0.0,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**{**given, **fields})


def dpo(*kinds: str, **fields: Any) -> Callable[[Made], Tensor]:
    """Return a loss of TRL's DPO trainer."""

    def compute(made: Made) -> Tensor:
        reference = made.outputs(made.logits)
        reference.log_probs = made.reference * made.mask[:, 1:]
        own = trainer(loss_types=list(kinds), ref_model=lambda **_: reference, **fields)
        inputs = {"input_ids": made.ids, "attention_mask": made.is_there.long(), "completion_mask": made.mask.long()}
        return DPOTrainer._compute_loss(own, lambda **_: made.outputs(made.logits), inputs, False)

    return compute


def kto(kind: str, **fields: Any) -> Callable[[Made], Tensor]:
    """Return a loss of TRL's KTO trainer, with a given estimate of the KL divergence."""

    def compute(made: Made) -> Tensor:
        reference = made.outputs(made.logits)
        reference.log_probs = made.reference * made.mask[:, 1:]

        def ref_model(**_: Any) -> Any:
            return reference

        def kl(model: Any, _batch: Any) -> Tensor:
            return torch.tensor([0.0 if model is ref_model else made.kl], dtype=torch.float64)

        weights = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
        given = {"loss_type": kind, "ref_model": ref_model, "_compute_kl_logps": kl, "calculate_KL": kind == "kto"}
        own = trainer(**weights, **given, **fields)
        inputs = {"input_ids": made.ids, "attention_mask": made.is_there.long(), "completion_mask": made.mask.long()}
        inputs["label"] = torch.from_numpy(made.verdicts).bool()
        return KTOTrainer._compute_loss(own, lambda **_: made.outputs(made.logits), inputs, False)

    return compute


def without_reference(kind: Any, **fields: Any) -> Callable[[Made], Tensor]:
    """Return a loss of TRL's CPO or ORPO trainer."""

    def compute(made: Made) -> Tensor:
        labels = made.ids.masked_fill(~made.mask, MASKED)
        inputs = {"concatenated_input_ids": made.ids, "concatenated_labels": labels}
        inputs["concatenated_attention_mask"] = made.mask.long()
        own = trainer(concatenated_inputs=lambda *_, **__: inputs, pad_token_id=0, padding_value=0, **fields)
        for name in ("get_batch_logps", "log1mexp"):
            setattr(own, name, getattr(kind, name, None))
        for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
            if hasattr(kind, name):
                setattr(own, name, getattr(kind, name).__get__(own))
        chosen = {"chosen_labels": labels[: made.num_pairs]}
        return kind.get_batch_loss_metrics(own, lambda *_, **__: SimpleNamespace(logits=made.logits), chosen)[0]

    return compute


def pair(term: Any, **fields: Any) -> PreferenceLoss:
    """Return a loss of pairs."""
    return PreferenceLoss(term, **fields)


MEANS = {"average_logprobs": True}
LIKELIHOOD = {"sft_weight": 1.0, "sft_average_logprobs": True}
SUM_OF_BCO_AND_IPO = (AddedTerm(BCO(beta=BETA), 0.2), AddedTerm(IPO(beta=BETA), 0.5, True))
CASES: dict[str, tuple[PreferenceLoss | KTOLoss, Callable[[Made], Tensor]]] = {
    "dpo": (pair(DPO(beta=BETA)), dpo("sigmoid")),
    "dpo of means": (pair(DPO(beta=2.0), **MEANS), dpo("sigmoid_norm", beta=2.0)),
    "robust-dpo": (pair(RobustDPO(beta=BETA, label_smoothing=0.15)), dpo("robust", label_smoothing=0.15)),
    "ipo": (pair(IPO(beta=BETA), **MEANS), dpo("ipo")),
    "hinge": (pair(Hinge(beta=BETA)), dpo("hinge")),
    "exo": (pair(EXO(beta=BETA, label_smoothing=0.05)), dpo("exo_pair", label_smoothing=0.05)),
    "nca": (pair(NCA(beta=BETA)), dpo("nca_pair")),
    "bco": (pair(BCO(beta=BETA)), dpo("bco_pair")),
    "sppo": (pair(SPPO(beta=BETA)), dpo("sppo_hard")),
    "aot": (pair(AOT(beta=BETA, label_smoothing=0.1)), dpo("aot", label_smoothing=0.1)),
    "aot-unpaired": (pair(UnpairedAOT(beta=BETA, label_smoothing=0.1)), dpo("aot_unpaired", label_smoothing=0.1)),
    "apo-zero": (pair(APOZero(beta=BETA)), dpo("apo_zero")),
    "apo-down": (pair(APODown(beta=BETA)), dpo("apo_down")),
    "discopop": (pair(DiscoPOP(beta=BETA, tau=0.4)), dpo("discopop", tau=0.4)),
    "forward_kl": (pair(DPO(beta=BETA), divergence="forward_kl"), dpo("sigmoid", f_divergence_type="forward_kl")),
    "js_divergence": (
        pair(DPO(beta=BETA), divergence="js_divergence"),
        dpo("sigmoid", f_divergence_type="js_divergence"),
    ),
    "alpha_divergence": (
        pair(DPO(beta=BETA), divergence="alpha_divergence", alpha=0.3),
        dpo("sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3),
    ),
    "LD-DPO": (pair(DPO(beta=BETA), ld_alpha=0.4), dpo("sigmoid", ld_alpha=0.4)),
    "WPO": (pair(DPO(beta=BETA), weighs_by_policy=True), dpo("sigmoid", use_weighting=True)),
    "MPO": (
        pair(DPO(beta=BETA), weight=0.8, added=SUM_OF_BCO_AND_IPO),
        dpo("sigmoid", "bco_pair", "ipo", loss_weights=[0.8, 0.2, 0.5]),
    ),
    "cpo": (pair(CPO(beta=BETA), **LIKELIHOOD), without_reference(CPOTrainer, loss_type="sigmoid", cpo_alpha=1.0)),
    "simpo": (
        pair(SimPO(beta=2.0, gamma=0.5), **MEANS),
        without_reference(CPOTrainer, loss_type="simpo", cpo_alpha=0, beta=2.0, simpo_gamma=0.5),
    ),
    "orpo": (pair(ORPO(beta=1.0), weight=BETA, **MEANS, **LIKELIHOOD), without_reference(ORPOTrainer)),
    "kto": (KTOLoss(beta=BETA, desirable_weight=1.3, undesirable_weight=0.8), kto("kto")),
    "apo-zero of responses": (
        KTOLoss(beta=BETA, desirable_weight=1.3, undesirable_weight=0.8, reference_point="zero"),
        kto("apo_zero_unpaired"),
    ),
}
OF_ONE_LENGTH = ("cpo", "orpo")
"""Losses with TRL's mean likelihood over the tokens of a batch, which is the mean over responses of one length."""


def largest(name: str, num_batches: int) -> tuple[float, float]:
    """Return the largest differences of the loss, relative above 1, and of its gradient."""
    loss, compute = CASES[name]
    worst = [0.0, 0.0]
    for seed in range(num_batches):
        made = Made(seed, equal_chosen=name in OF_ONE_LENGTH)
        value, gradient = made.ours(loss)
        with in_float64():
            other, of_other = made.theirs(compute)
        differences = (abs(value - other) / max(1.0, abs(other)), (gradient - of_other).abs().max().item())
        worst = [max(pair) for pair in zip(worst, differences, strict=True)]
    return worst[0], worst[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=60, metavar="N", help="of each loss (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="see that it runs: two batches")
    chosen = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    found = [(name, *largest(name, 2 if chosen.quick else chosen.batches)) for name in chosen.only]
    print(f"{surroundings('rl-algos', 'trl')}\n")
    shown = [(name, f"{value:.1e}", f"{gradient:.1e}") for name, value, gradient in found]
    print(table(("loss", "value", "gradient"), shown))


if __name__ == "__main__":
    main()
