import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from preference_oracle import kto_loss, likelihood, policy_weight, term_mean

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
    PAIR_TERMS,
    SPPO,
    AddedTerm,
    APODown,
    APOZero,
    DiscoPOP,
    Hinge,
    KTOLoss,
    PreferenceLoss,
    ProcessLoss,
    RobustDPO,
    SimPO,
    UnpairedAOT,
)
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

LENGTHS = (5, 9, 2, 7, 4, 3, 8, 6)
NUM_PAIRS = len(LENGTHS) // 2
HALF = {"weight": 0.7, "sft_weight": 0.4}
KTO = KTOLoss(beta=0.3, desirable_weight=1.3, undesirable_weight=0.8)
PAIRWISE = {
    "dpo": PreferenceLoss(DPO(beta=0.3)),
    "cdpo": PreferenceLoss(DPO(beta=0.3, label_smoothing=0.2)),
    "dpo by mean logprobs": PreferenceLoss(DPO(beta=2.0), average_logprobs=True),
    "dpo with a length penalty": PreferenceLoss(DPO(beta=0.2, length_penalty=0.1)),
    "dpo with sft": PreferenceLoss(DPO(beta=0.3), weight=0.7, sft_weight=0.4),
    "dpo with mean sft": PreferenceLoss(DPO(beta=0.3), sft_weight=0.4, sft_average_logprobs=True),
    "sft alone": PreferenceLoss(DPO(), weight=0.0, sft_weight=1.0),
    "robust dpo": PreferenceLoss(RobustDPO(beta=0.3, label_smoothing=0.15)),
    "ipo": PreferenceLoss(IPO(beta=0.2)),
    "ipo by mean logprobs": PreferenceLoss(IPO(beta=0.2), average_logprobs=True),
    "hinge": PreferenceLoss(Hinge(beta=0.3)),
    "simpo": PreferenceLoss(SimPO(beta=2.5, gamma=0.8), average_logprobs=True),
    "cpo": PreferenceLoss(CPO(beta=0.2), sft_weight=1.0),
    "orpo": PreferenceLoss(ORPO(), weight=0.1, average_logprobs=True, sft_weight=1.0, sft_average_logprobs=True),
    "dpo with an offset": PreferenceLoss(DPO(beta=0.2, margin_weight=0.6)),
    "exo": PreferenceLoss(EXO(beta=0.3, label_smoothing=0.05)),
    "nca": PreferenceLoss(NCA(beta=0.3)),
    "bco": PreferenceLoss(BCO(beta=0.3), **HALF),
    "sppo": PreferenceLoss(SPPO(beta=0.2)),
    "aot": PreferenceLoss(AOT(beta=0.3, label_smoothing=0.1)),
    "aot unpaired": PreferenceLoss(UnpairedAOT(beta=0.3, label_smoothing=0.1)),
    "apo-zero": PreferenceLoss(APOZero(beta=0.3)),
    "apo-down": PreferenceLoss(APODown(beta=0.3)),
    "discopop": PreferenceLoss(DiscoPOP(beta=0.3, tau=0.4)),
    "forward kl": PreferenceLoss(DPO(beta=0.3), divergence="forward_kl"),
    "jensen-shannon": PreferenceLoss(EXO(beta=0.3), divergence="js_divergence"),
    "alpha": PreferenceLoss(IPO(beta=0.3), average_logprobs=True, divergence="alpha_divergence", alpha=0.3),
    "alpha of 1": PreferenceLoss(DPO(beta=0.3), divergence="alpha_divergence", alpha=1.0),
    "ld-dpo": PreferenceLoss(DPO(beta=0.3), ld_alpha=0.4, **HALF),
    "ld-dpo without a tail": PreferenceLoss(NCA(beta=0.3), ld_alpha=0.0),
    "ld-aot": PreferenceLoss(AOT(beta=0.3), ld_alpha=0.4),
    "wpo": PreferenceLoss(DPO(beta=0.3), weighs_by_policy=True, **HALF),
    "mpo": PreferenceLoss(
        DPO(beta=0.3), added=(AddedTerm(BCO(beta=0.3), 0.2), AddedTerm(IPO(beta=0.3), 0.5, True)), **HALF
    ),
    "all at once": PreferenceLoss(
        Hinge(beta=0.3),
        added=(AddedTerm(EXO(beta=0.3), 0.2),),
        divergence="js_divergence",
        ld_alpha=0.3,
        weighs_by_policy=True,
        sft_weight=0.1,
    ),
    "aot with others": PreferenceLoss(NCA(beta=0.3), added=(AddedTerm(AOT(beta=0.3), 0.3),)),
}
ALL = {**PAIRWISE, "kto": KTO, "apo-zero of single responses": KTOLoss(beta=0.3, reference_point="zero")}


def make_batch(seed=0, *, scale=1.0):
    """Ragged rows, the chosen one of each pair first; `scale` multiplies all differences from the reference."""
    random = np.random.default_rng(seed)
    total, count = sum(LENGTHS), len(LENGTHS)
    mask = [(random.random(n) < 0.6).astype(np.uint8) for n in LENGTHS]
    for row in mask:
        row[0], row[-1] = 0, 1
    logprobs = Ragged.from_rows([-random.exponential(1, n) - 0.01 for n in LENGTHS], np.float64)
    return Batch(
        {
            "tokens": Ragged.from_rows([np.arange(n) for n in LENGTHS], np.int32),
            "logprobs": logprobs,
            "ref_logprobs": logprobs.like(logprobs.values + scale * random.normal(0, 0.5, total)),
            "loss_mask": Ragged.from_rows(mask, np.uint8),
            "pair": np.arange(count) // 2,
            "is_chosen": (np.arange(count) % 2 == 0).astype(np.uint8),
            "margin": np.repeat(random.exponential(1, NUM_PAIRS), 2),
            "collision": logprobs.like(random.random(total) * 0.9 + 0.05),
            "verdict": random.integers(0, 2, count).astype(np.float64),
            "kl": np.full(count, 0.37),
        }
    )


class Reads:
    """A policy whose logprobs are given."""

    def __init__(self, logprobs):
        self.logprobs = logprobs

    def infer(self, batch, reads, *, reference=False, temperature=1.0):
        return Batch({"logprobs": self.logprobs})


def completed(loss, batch):
    """The batch with the columns that the loss needs of all rows."""
    if isinstance(loss, KTOLoss) or not loss.term.uses_reference:
        return batch
    return pair_columns(loss, lambda batch, _policy: batch, batch, Reads(batch.ragged("logprobs")))


def loss_and_gradient(loss, batch, parts=None):
    """The loss and its gradient by the logprobs, summed over microbatches."""
    compute, totals = resolve(loss.implementation), loss.totals(batch)
    value, by_row = 0.0, {}
    for rows in parts or [range(len(batch))]:
        part = batch.select(list(rows))
        columns = {name: torch.from_numpy(getattr(part[name], "values", part[name])) for name in part}
        reads = {name: columns.pop(name) for name in ("logprobs", "collision")}
        logprobs = reads["logprobs"].requires_grad_()
        kept = {name: columns[name] for name in ("tokens", *loss.columns)}
        share = compute(loss, reads, Rows(torch.from_numpy(part.ragged("tokens").offsets), kept)).loss(totals)
        share.backward()
        value += share.item()
        ends = np.cumsum(part.ragged("tokens").lengths)[:-1]
        by_row.update(zip(rows, np.split(logprobs.grad.numpy(), ends), strict=True))
    return value, np.concatenate([by_row[row] for row in range(len(batch))])


def plain_rows(batch):
    """Each row as plain lists and numbers."""
    names = ("logprobs", "ref_logprobs", "loss_mask", "collision")
    ragged = {name: [row.tolist() for row in batch.ragged(name)] for name in names}
    numbers = {name: batch.array(name) for name in ("verdict", "margin")}
    return [{name: values[index] for name, values in {**ragged, **numbers}.items()} for index in range(len(batch))]


def expected(loss, batch, *, weights_of=None):
    """The loss by its formula; `weights_of` are the pairs that give the weights, which no gradient goes through."""
    rows = plain_rows(batch)
    if isinstance(loss, KTOLoss):
        settings = {name: getattr(loss, name) for name in ("beta", "desirable_weight", "undesirable_weight")}
        return kto_loss(rows, batch.array("kl")[0] if loss.reference_point == "batch" else 0.0, **settings)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    weights = [policy_weight(c) * policy_weight(r) for c, r in (pairs if weights_of is None else weights_of)]
    total = 0.0
    for added in (AddedTerm(loss.term, loss.weight, loss.average_logprobs), *loss.added):
        total += added.weight * term_mean(
            pairs,
            added.term.name,
            average=added.average_logprobs,
            reference=added.term.uses_reference,
            divergence=loss.divergence,
            alpha=loss.alpha,
            ld_alpha=loss.ld_alpha,
            weights=weights if loss.weighs_by_policy else None,
            **{field.name: getattr(added.term, field.name) for field in fields(added.term)},
        )
    return total + (loss.sft_weight and loss.sft_weight * likelihood(pairs, average=loss.sft_average_logprobs))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loss_is_the_formula_of_its_paper(name, seed):
    batch = completed(ALL[name], make_batch(seed))
    assert loss_and_gradient(ALL[name], batch)[0] == pytest.approx(expected(ALL[name], batch), rel=1e-10)


@pytest.mark.parametrize("name", ALL)
def test_a_gradient_is_that_of_finite_differences(name):
    loss, step = ALL[name], 1e-6
    batch = completed(loss, make_batch(3))
    rows = plain_rows(batch)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    _, gradient = loss_and_gradient(loss, batch)
    logprobs = batch.ragged("logprobs")
    for place in range(len(logprobs.values)):
        moved = []
        for sign in (1, -1):
            values = logprobs.values.copy()
            values[place] += sign * step
            moved.append(expected(loss, batch.with_columns({"logprobs": logprobs.like(values)}), weights_of=pairs))
        assert gradient[place] == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_microbatches_of_whole_pairs_change_nothing(name):
    batch = completed(ALL[name], make_batch(5))
    value, gradient = loss_and_gradient(ALL[name], batch)
    parts = [[6, 1, 0, 7], [2, 3], [5, 4]]
    split_value, split_gradient = loss_and_gradient(ALL[name], batch, parts)
    assert split_value == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(split_gradient, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [1.0, 400.0])
def test_extremes_on_and_nonsense_off_the_mask_leave_everything_finite(name, scale):
    batch = completed(ALL[name], make_batch(7, scale=scale))
    off = batch.ragged("loss_mask").values == 0
    columns = {}
    for column in ("logprobs", "ref_logprobs", "collision"):
        values = batch.ragged(column).values.astype(np.float32)
        values[off] = np.resize([np.nan, np.inf, -np.inf, 200.0, -200.0], off.sum())
        columns[column] = batch.ragged(column).like(values)
    columns |= {name: batch.array(name).astype(np.float32) for name in ("verdict", "kl", "margin")}
    value, gradient = loss_and_gradient(ALL[name], batch.with_columns(columns))
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not gradient[off].any()
    clean = {
        column: batch.ragged(column).like(batch.ragged(column).values.astype(np.float32))
        for column in columns
        if column in ("logprobs", "ref_logprobs", "collision")
    }
    assert value == pytest.approx(loss_and_gradient(ALL[name], batch.with_columns({**columns, **clean}))[0], rel=1e-6)


def test_a_certain_response_has_finite_odds():
    batch = make_batch(2)
    certain = batch.ragged("logprobs").like(np.zeros(sum(LENGTHS), np.float32))
    value, gradient = loss_and_gradient(ALL["orpo"], batch.with_columns({"logprobs": certain}))
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", [name for name, kind in PAIR_TERMS.items() if kind.uses_reference])
def test_a_policy_that_is_its_reference_has_the_loss_of_no_opinion(name):
    batch = make_batch(4)
    batch = batch.with_columns({"ref_logprobs": batch.ragged("logprobs")})
    loss = PreferenceLoss(PAIR_TERMS[name]())
    ln2 = math.log(2)
    no_opinion = {"dpo": ln2, "robust-dpo": ln2, "ipo": 25.0, "hinge": 1.0, "nca": 2 * ln2, "bco": 2 * ln2}
    no_opinion |= {"sppo": 50.0, "aot": ln2, "aot-unpaired": ln2, "apo-zero": 1.0, "apo-down": 1.0}
    no_opinion |= {"exo": -ln2 - (math.log(0.999) + math.log(0.001)) / 2, "discopop": (ln2 + 1) / 2}
    assert loss_and_gradient(loss, completed(loss, batch))[0] == pytest.approx(no_opinion[name], rel=1e-12)


def test_label_smoothing_above_one_half_is_refused():
    for kind in (DPO, RobustDPO):
        with pytest.raises(ValueError, match=r"label_smoothing must be at least 0 and below 0\.5, got 0\.5"):
            kind(label_smoothing=0.5)


def test_metrics_tell_rewards_and_accuracy():
    batch = make_batch(6)
    loss = PreferenceLoss(DPO(beta=0.3))
    columns = {name: torch.from_numpy(getattr(batch[name], "values", batch[name])) for name in batch}
    sums = resolve(loss.implementation)(
        loss, {"logprobs": columns["logprobs"]}, Rows(torch.from_numpy(batch.ragged("tokens").offsets), columns)
    )
    found = {name: metric.value.item() / NUM_PAIRS for name, metric in sums.metrics.items()}
    rows = plain_rows(batch)
    rewards = []
    for row in rows:
        pairs = zip(row["logprobs"], row["ref_logprobs"], row["loss_mask"], strict=True)
        rewards.append(0.3 * sum(own - ref for own, ref, masked in pairs if masked))
    chosen, rejected = np.array(rewards[::2]), np.array(rewards[1::2])
    assert found["accuracy"] == np.mean(chosen > rejected)
    assert found["margin"] == pytest.approx(np.mean(chosen - rejected))
    assert found["reward_chosen"] == pytest.approx(chosen.mean())
    assert found["reward_rejected"] == pytest.approx(rejected.mean())
    assert found["preference_loss"] == pytest.approx(expected(loss, batch))


def test_equal_rewards_are_half_right():
    batch = make_batch(6)
    batch = batch.with_columns({"ref_logprobs": batch.ragged("logprobs")})
    loss = PreferenceLoss(DPO())
    columns = {name: torch.from_numpy(getattr(batch[name], "values", batch[name])) for name in batch}
    rows = Rows(torch.from_numpy(batch.ragged("tokens").offsets), columns)
    metric = resolve(loss.implementation)(loss, {"logprobs": columns["logprobs"]}, rows).metrics["accuracy"]
    assert metric.value.item() == NUM_PAIRS / 2


def test_a_pair_that_is_torn_apart_is_refused():
    with pytest.raises(ValueError, match="1 of 4 pairs"):
        PreferenceLoss(DPO()).totals(make_batch().select(range(7)))
    both_chosen = make_batch().with_columns({"is_chosen": np.ones(8, np.uint8)})
    with pytest.raises(ValueError, match="4 of 4 pairs"):
        PreferenceLoss(DPO()).totals(both_chosen)


def test_a_shard_without_rows_counts_nothing():
    assert PreferenceLoss(DPO()).totals(make_batch().select([])) == {"pairs": 0.0}
    assert KTO.totals(make_batch().select([])) == {"responses": 0.0}


def test_a_process_loss_is_the_cross_entropy_of_the_scores_at_the_ends_of_steps():
    random, lengths, loss = np.random.default_rng(0), (4, 6), ProcessLoss()
    scores = [random.normal(0, 2, n) for n in lengths]
    labels = [np.full(n, -1.0) for n in lengths]
    labels[0][[1, 3]], labels[1][[2, 4]] = (1, 0), (0.25, 1)
    # The value at a token is the score of the row up to the token before it, and the score that of the whole row.
    values = [np.append(0.0, row[:-1]) for row in scores]
    reads = {
        "values": torch.tensor(np.concatenate(values), requires_grad=True),
        "scores": torch.tensor([row[-1] for row in scores], requires_grad=True),
    }
    rows = Rows(torch.tensor([0, 4, 10]), {"step_labels": torch.tensor(np.concatenate(labels))})
    sums = resolve(loss.implementation)(loss, reads, rows)
    value = sums.loss({"steps": 4.0})
    value.backward()
    expected, right = 0.0, []
    for row, of_row in zip(scores, labels, strict=True):
        for score, label in zip(row, of_row, strict=True):
            if label >= 0:
                q = 1 / (1 + math.exp(-score))
                expected -= (label * math.log(q) + (1 - label) * math.log(1 - q)) / 4
                right.append((score > 0) == (label > 0.5))
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert sums.metrics["accuracy"].value.item() == sum(right)
    assert np.flatnonzero(reads["values"].grad.numpy()).tolist() == [2, 7, 9]
    assert np.flatnonzero(reads["scores"].grad.numpy()).tolist() == [0]
