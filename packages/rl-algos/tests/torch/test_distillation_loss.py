"""The distillation loss against sums over a whole small vocabulary in float64, written from the papers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.losses.distillation import (
    MIN_TAIL,
    STATE_WEIGHTS,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_TOKEN_LOGPROBS,
    DistillationLoss,
    Divergence,
    WholeDistillationLoss,
)
from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.torch.distillation import compute, compute_whole
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.testing.torch.live_memory import LiveMemory
from rl_core.torch.loss import Rows

LENGTHS, VOCABULARY = [4, 1, 6, 3], 7
OFFSETS = np.cumsum([0, *LENGTHS])
DIVERGENCES = {
    "forward": Divergence("forward"),
    "reverse": Divergence("reverse"),
    "mixed": Divergence("mixed", mixed_weight=0.3),
    "jensen_shannon": Divergence("jensen_shannon", beta=0.2),
}


def logits_and_mask(seed=0, scale=2.0):
    """Logits of teacher and student at each token, and a mask that leaves some out."""
    random = np.random.default_rng(seed)
    teacher, student = scale * random.normal(size=(2, OFFSETS[-1], VOCABULARY))
    mask = (random.random(OFFSETS[-1]) < 0.7).astype(np.uint8)
    mask[OFFSETS[:-1]] = 0
    return teacher, student, mask


def probabilities(logits):
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def kl(p, q):
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def divergence_of(kind, p, q):
    if kind.name == "jensen_shannon":
        mixture = [kind.beta * a + (1 - kind.beta) * b for a, b in zip(p, q, strict=True)]
        return kind.beta * kl(p, mixture) + (1 - kind.beta) * kl(q, mixture)
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": kind.mixed_weight}[kind.name]
    return weight * kl(p, q) + (1 - weight) * kl(q, p)


def oracle(kind, teacher, student, mask, k):
    """The mean over the tokens under the mask, one token at a time."""
    found = []
    for token in np.flatnonzero(mask):
        p, q = probabilities(teacher[token]), probabilities(student[token])
        best = sorted(range(VOCABULARY), key=lambda token: -p[token])
        if k < VOCABULARY:
            p, q = ([dist[i] for i in best[:k]] + [sum(dist[i] for i in best[k:])] for dist in (p, q))
        found.append(divergence_of(kind, p, q))
    return sum(found) / len(found)


def teacher_columns(teacher, k):
    logprobs = torch.tensor(teacher).log_softmax(-1)
    best = logprobs.topk(k)
    return best.indices.int(), best.values


def value_of(loss, student, mask, ids, logprobs, reads=None):
    """The loss of one microbatch that is the whole batch."""
    batch = Batch({"loss_mask": Ragged(mask, OFFSETS)})
    columns = {"loss_mask": torch.tensor(mask), TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}
    if reads is None:
        at = student.log_softmax(-1).gather(1, ids.long().clamp(min=0)).masked_fill(ids < 0, 0.0)
        reads = {"logprobs_at": at, "logprobs": student.log_softmax(-1)[:, 0]}
    sums = compute(loss, reads, Rows(torch.tensor(OFFSETS), columns))
    return sums.loss(loss.totals(batch)), sums


@pytest.mark.parametrize("k", [1, 3, VOCABULARY])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_is_that_of_the_whole_vocabulary_with_a_tail(name, k):
    teacher, student, mask = logits_and_mask()
    value, _ = value_of(DistillationLoss(DIVERGENCES[name]), torch.tensor(student), mask, *teacher_columns(teacher, k))
    assert value.item() == pytest.approx(oracle(DIVERGENCES[name], teacher, student, mask, k), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("k", [2, VOCABULARY])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_is_that_of_finite_differences(name, k):
    teacher, student, mask = logits_and_mask(1)
    logits = torch.tensor(student, requires_grad=True)
    value_of(DistillationLoss(DIVERGENCES[name]), logits, mask, *teacher_columns(teacher, k))[0].backward()
    h, expected = 1e-6, np.zeros_like(student)
    for place in np.ndindex(*student.shape):
        nudge = np.zeros_like(student)
        nudge[place] = h
        up, down = (oracle(DIVERGENCES[name], teacher, student + sign * nudge, mask, k) for sign in (1, -1))
        expected[place] = (up - down) / (2 * h)
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_more_tokens_tell_the_distributions_further_apart(name):
    teacher, student, mask = logits_and_mask(2)
    loss = DistillationLoss(DIVERGENCES[name])
    values = [
        value_of(loss, torch.tensor(student), mask, *teacher_columns(teacher, k))[0].item()
        for k in range(1, VOCABULARY + 1)
    ]
    assert (np.diff(values) > -1e-12).all()
    assert values[0] > 0


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(name):
    teacher, _, mask = logits_and_mask(3)
    logits = torch.tensor(teacher, requires_grad=True)
    value, sums = value_of(DistillationLoss(DIVERGENCES[name]), logits, mask, *teacher_columns(teacher, 3))
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert logits.grad.abs().max() < 1e-12
    assert sums.metrics["forward_kl"].value.item() == pytest.approx(0, abs=1e-12)


def test_ids_that_are_not_there_count_to_the_tail():
    teacher, student, mask = logits_and_mask(4)
    ids, logprobs = teacher_columns(teacher, 3)
    more_ids = torch.cat([ids, torch.full((len(ids), 2), -1, dtype=torch.int32)], 1)
    more_logprobs = torch.cat([logprobs, torch.full((len(ids), 2), torch.nan)], 1)
    loss = DistillationLoss(Divergence("mixed"))
    expected, _ = value_of(loss, torch.tensor(student), mask, ids, logprobs)
    found, _ = value_of(loss, torch.tensor(student), mask, more_ids, more_logprobs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_text_itself_is_learned_by_its_weight():
    teacher, student, mask = logits_and_mask(5)
    columns = teacher_columns(teacher, 3)
    plain, _ = value_of(DistillationLoss(), torch.tensor(student), mask, *columns)
    loss = DistillationLoss(nll_weight=0.25)
    found, sums = value_of(loss, torch.tensor(student), mask, *columns)
    nll = np.mean([-math.log(probabilities(student[token])[0]) for token in np.flatnonzero(mask)])
    assert found.item() == pytest.approx(plain.item() + 0.25 * nll, rel=1e-12)
    assert sums.metrics["nll"].value.item() == pytest.approx(nll * mask.sum(), rel=1e-12)
    assert [read.name for read in loss.reads] == ["logprobs_at", "logprobs"]


def test_metrics_are_sums_over_the_tokens_under_the_mask():
    teacher, student, mask = logits_and_mask(6)
    _, sums = value_of(DistillationLoss(), torch.tensor(student), mask, *teacher_columns(teacher, 2))
    values = {name: metric.value.item() / mask.sum() for name, metric in sums.metrics.items()}
    for name in ("forward", "reverse"):
        expected = oracle(DIVERGENCES[name], teacher, student, mask, 2)
        assert values[f"{name}_kl"] == pytest.approx(expected, rel=1e-9)
    tails = [1 - sum(sorted(probabilities(teacher[token]))[-2:]) for token in np.flatnonzero(mask)]
    assert values["teacher_tail"] == pytest.approx(np.mean(tails), rel=1e-9)


def test_float32_logprobs_of_the_whole_vocabulary_leave_no_tail():
    teacher, student, mask = logits_and_mask(7, scale=6.0)
    ids, logprobs = teacher_columns(teacher, VOCABULARY)
    logits = torch.tensor(student, dtype=torch.float32, requires_grad=True)
    for name, kind in DIVERGENCES.items():
        value, _ = value_of(DistillationLoss(kind), logits, mask, ids, logprobs.float())
        assert value.item() == pytest.approx(oracle(kind, teacher, student, mask, VOCABULARY), rel=2e-5), name


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(DIVERGENCES)))
def test_extremes_under_the_mask_and_anything_off_it_stay_finite(seed, name):
    random = np.random.default_rng(seed)
    mask = logits_and_mask(seed)[2]
    wild = random.choice([-np.inf, np.nan, np.inf, -200.0, 0.0, 50.0], size=(2, OFFSETS[-1], 3))
    tame = np.sort(-random.choice([0.0, 1e-9, 1e-4, 1.0, 30.0, 200.0], size=(2, OFFSETS[-1], 3)), axis=-1)
    tame -= np.log(np.exp(tame).sum(-1, keepdims=True)) * (random.random() < 0.5)
    tame[0, ..., 2] = np.where(random.random(OFFSETS[-1]) < 0.2, -np.inf, tame[0, ..., 2])
    teacher, student = (torch.tensor(each, dtype=torch.float32) for each in np.where(mask[:, None] > 0, tame, wild))
    student = student.requires_grad_()
    ids = torch.tensor(random.integers(-1, VOCABULARY, (OFFSETS[-1], 3)), dtype=torch.int32)
    value, sums = value_of(
        DistillationLoss(DIVERGENCES[name]), None, mask, ids, teacher, reads={"logprobs_at": student}
    )
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(student.grad).all()
    assert (student.grad[mask == 0] == 0).all()
    assert all(torch.isfinite(metric.value) for metric in sums.metrics.values())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_microbatches_add_up_to_the_whole(name):
    teacher, student, mask = logits_and_mask(8)
    ids, logprobs = teacher_columns(teacher, 3)
    loss = DistillationLoss(DIVERGENCES[name])
    whole, _ = value_of(loss, torch.tensor(student), mask, ids, logprobs)
    totals, parts = {"tokens": float(mask.sum())}, 0.0
    for first, last in ((0, 1), (1, 4)):
        tokens = slice(OFFSETS[first], OFFSETS[last])
        at = torch.tensor(student[tokens]).log_softmax(-1).gather(1, ids[tokens].long())
        columns = {"loss_mask": mask[tokens], TEACHER_IDS: ids[tokens], TEACHER_LOGPROBS: logprobs[tokens]}
        rows = Rows(
            torch.tensor(OFFSETS[first : last + 1] - OFFSETS[first]),
            {name: torch.as_tensor(column) for name, column in columns.items()},
        )
        parts += compute(loss, {"logprobs_at": at}, rows).loss(totals).item()
    assert parts == pytest.approx(whole.item(), rel=1e-12)


def test_a_rare_tail_is_told_from_none_down_to_its_bound():
    mask = np.array([0, 1], np.uint8)
    assert np.log1p(-MIN_TAIL) < 0
    for tail in (1e-2, 1e-4):
        p = torch.tensor([[0.0], [math.log1p(-tail)]], dtype=torch.float32)
        rows = Rows(
            torch.tensor([0, 2]),
            {"loss_mask": torch.tensor(mask), TEACHER_IDS: torch.zeros(2, 1, dtype=torch.int32), TEACHER_LOGPROBS: p},
        )
        metrics = compute(DistillationLoss(), {"logprobs_at": p}, rows).metrics
        assert metrics["teacher_tail"].value.item() == pytest.approx(tail, rel=5e-3)


@pytest.mark.parametrize(
    ("settings_", "message"), [({"mixed_weight": 1.5}, "mixed_weight must be"), ({"beta": 0.0}, "got 0.0.*forward")]
)
def test_weights_that_make_no_sense_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        Divergence(**settings_)


@pytest.mark.parametrize("size", [4, 9, 1000])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_chunks_of_tokens_add_up_to_the_whole(monkeypatch, name, size):
    teacher, student, mask = logits_and_mask(5)
    loss = DistillationLoss(DIVERGENCES[name], nll_weight=0.3)
    found = []
    for chunk in (size, 2**22):
        monkeypatch.setattr("rl_algos.torch.distillation.CHUNK", chunk)
        logits = torch.tensor(student, requires_grad=True)
        value, sums = value_of(loss, logits, mask, *teacher_columns(teacher, 3))
        (2 * value).backward()
        found.append((value.detach(), logits.grad, {name: part.value for name, part in sums.metrics.items()}))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_an_evaluation_in_chunks_needs_no_gradient(monkeypatch):
    monkeypatch.setattr("rl_algos.torch.distillation.CHUNK", 8)
    teacher, student, mask = logits_and_mask(5)
    with torch.no_grad():
        value, _ = value_of(DistillationLoss(), torch.tensor(student), mask, *teacher_columns(teacher, 3))
    assert value.item() == pytest.approx(oracle(Divergence("forward"), teacher, student, mask, 3), rel=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_many_tokens_of_the_teacher_take_the_memory_of_a_chunk_beside_their_gradient(monkeypatch, name):
    """8192 of the teacher's tokens at each of 128 positions: as many as may travel."""
    k, tokens = 8192, 128
    monkeypatch.setattr("rl_algos.torch.distillation.CHUNK", 8 * (k + 1))
    generator = torch.Generator().manual_seed(0)
    at, by_teacher = (torch.randn(tokens, k + 9, generator=generator).log_softmax(1)[:, :k] for _ in range(2))
    at = at.clone().requires_grad_()
    ids, mask = torch.arange(k, dtype=torch.int32).expand(tokens, k), np.ones(tokens, np.uint8)
    columns = {"loss_mask": torch.tensor(mask), TEACHER_IDS: ids, TEACHER_LOGPROBS: by_teacher}
    with LiveMemory() as memory:
        sums = compute(
            DistillationLoss(DIVERGENCES[name]), {"logprobs_at": at}, Rows(torch.tensor([0, tokens]), columns)
        )
        sums.objective["tokens"].backward()
    # the gradient and its product with that of the loss; what a chunk takes beside the gradient is less
    assert memory.peak < 2.1 * tokens * k * 4
    assert memory.largest <= tokens * k * 4


@pytest.mark.parametrize("chunk", [8, 2**22])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_importance_weights_are_factors_of_the_divergences_and_may_divide_them(monkeypatch, name, normalized, chunk):
    monkeypatch.setattr("rl_algos.torch.distillation.CHUNK", chunk)
    teacher, student, mask = logits_and_mask(9)
    ids, logprobs = teacher_columns(teacher, 3)
    weights = np.random.default_rng(1).exponential(size=len(mask))
    loss = DistillationLoss(DIVERGENCES[name], importance=ImportanceCorrection(batch_normalize=normalized))
    batch = Batch({"loss_mask": Ragged(mask, OFFSETS), STATE_WEIGHTS: Ragged(weights, OFFSETS)})
    totals, found, gradient = loss.totals(batch), 0.0, np.zeros_like(student)
    for first, last in ((0, 1), (1, 4)):
        tokens = slice(OFFSETS[first], OFFSETS[last])
        logits = torch.tensor(student[tokens], requires_grad=True)
        at = logits.log_softmax(-1).gather(1, ids[tokens].long())
        columns = {
            "loss_mask": torch.tensor(mask[tokens]),
            TEACHER_IDS: ids[tokens],
            TEACHER_LOGPROBS: logprobs[tokens],
            STATE_WEIGHTS: torch.tensor(weights[tokens]),
        }
        rows = Rows(torch.tensor(OFFSETS[first : last + 1] - OFFSETS[first]), columns)
        part = compute(loss, {"logprobs_at": at}, rows).loss(totals)
        part.backward()
        found, gradient[tokens] = found + part.item(), logits.grad.numpy()

    learned = np.flatnonzero(mask)
    divisor = weights[learned].sum() if normalized else len(learned)

    def expected(student):
        of_tokens = [oracle(DIVERGENCES[name], teacher, student, np.eye(len(mask))[token], 3) for token in learned]
        return (weights[learned] * of_tokens).sum() / divisor

    assert found == pytest.approx(expected(student), rel=1e-9)
    nudge = np.zeros_like(student)
    nudge[learned[1], 2] = 1e-6
    slope = (expected(student + nudge) - expected(student - nudge)) / 2e-6
    assert gradient[learned[1], 2] == pytest.approx(slope, rel=1e-6)


def test_importance_weights_are_factors_of_the_divergences_of_whole_vocabularies():
    random = np.random.default_rng(2)
    found, weights = random.exponential(size=(OFFSETS[-1], 6)), random.exponential(size=OFFSETS[-1])
    _, _, mask = logits_and_mask(9)
    settings = {"heads": (), "vocabulary": VOCABULARY, "importance": ImportanceCorrection()}
    columns = {"loss_mask": mask, STATE_WEIGHTS: weights, TEACHER_TOKEN_LOGPROBS: np.zeros(len(mask))}
    rows = Rows(torch.tensor(OFFSETS), {name: torch.tensor(column) for name, column in columns.items()})
    for place, name in enumerate(["forward", "reverse", "jensen_shannon"]):
        loss = WholeDistillationLoss(DIVERGENCES[name], **settings)
        assert STATE_WEIGHTS in loss.columns
        sums = compute_whole(loss, {"divergences": torch.tensor(found)}, rows)
        assert sums.objective["tokens"].item() == pytest.approx((mask * weights * found[:, place]).sum())
        assert sums.metrics["forward_kl"].value.item() == pytest.approx((mask * found[:, 0]).sum())
