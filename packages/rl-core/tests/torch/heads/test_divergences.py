"""Divergences from another head over whole vocabularies, against sums in float64 and finite differences."""

import math

import pytest
import split_cases
import torch

from rl_core.model import DIVERGENCES, HeadFiles, divergences_from
from rl_core.testing.torch.live_memory import LiveMemory
from rl_core.torch.heads import reads as reads_module
from rl_core.torch.heads.divergences import Other, divergences
from rl_core.torch.heads.logprobs import Head, LogitTransform
from rl_core.torch.loss import Rows

NUM, BETA, TEMPERATURE = 6, 0.3, 0.7
CAP = LogitTransform(scale=2.0, softcap=1.5)


def draw(*shape, seed, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def models(vocab, other_vocab, *, scale=1.0):
    """Hidden states and head of both models, whose hidden sizes differ."""
    own = draw(NUM, 5, seed=0, scale=scale), Head(draw(vocab, 5, seed=1), draw(vocab, seed=2), CAP)
    other = Other(draw(NUM, 3, seed=3, scale=scale), Head(draw(other_vocab, 3, seed=4)))
    return *own, other


def grouped(logits, below):
    """Masses of the ids below, and of all others together."""
    masses = (logits / TEMPERATURE).softmax(-1)
    return torch.cat([masses[:, :below], masses[:, below:].sum(1, keepdim=True)], 1)


def oracle(hidden, head, other, below):
    """The first three divergences, one outcome at a time."""
    p = grouped(other.hidden @ other.head.weight.T, below)
    q = grouped(head.transform(hidden @ head.weight.T + head.bias), below)
    m = BETA * p + (1 - BETA) * q

    def kl(a, b):
        return torch.where(a > 0, a * (a.log() - b.log()), 0.0).sum(1)

    return torch.stack([kl(p, q), kl(q, p), BETA * kl(p, m) + (1 - BETA) * kl(q, m)], 1)


SIZES = {"one vocabulary": (11, 11, 11), "tails on both sides": (11, 13, 9), "a few of many": (40, 12, 3)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("chunk_size", [2, 100])
def test_divergences_are_sums_over_all_ids_and_the_tail(sizes, chunk_size):
    vocab, other_vocab, below = sizes
    hidden, head, other = models(vocab, other_vocab)
    targets = torch.arange(NUM) % below
    found = divergences(
        hidden, head, targets, other, below=below, beta=BETA, temperature=TEMPERATURE, chunk_size=chunk_size
    )
    assert found.shape == (NUM, len(DIVERGENCES))
    torch.testing.assert_close(found[:, :3], oracle(hidden, head, other, below), rtol=1e-10, atol=1e-12)
    of_other, own = other.hidden @ other.head.weight.T, head.transform(hidden @ head.weight.T + head.bias)
    tails = torch.stack([grouped(logits, below)[:, -1] for logits in (of_other, own)], 1)
    torch.testing.assert_close(found[:, 3:5], tails, rtol=1e-10, atol=1e-12)
    logprobs = (of_other / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(found[:, 5], logprobs.gather(1, targets[:, None])[:, 0])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_are_those_of_the_sums(sizes):
    vocab, other_vocab, below = sizes
    hidden, head, other = models(vocab, other_vocab)
    weights = draw(NUM, 3, seed=7)
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, head.weight, head.bias)]
    found = divergences(
        inputs[0],
        Head(inputs[1], inputs[2], CAP),
        torch.zeros(NUM, dtype=torch.int64),
        other,
        below=below,
        beta=BETA,
        temperature=TEMPERATURE,
        chunk_size=4,
    )
    grads = torch.autograd.grad((found[:, :3] * weights).sum(), inputs)
    expected = oracle(inputs[0], Head(inputs[1], inputs[2], CAP), other, below)
    for grad, by_oracle in zip(grads, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, by_oracle, rtol=1e-8, atol=1e-10)


def test_a_gradient_is_that_of_finite_differences():
    hidden, head, other = models(11, 13)
    options = {"below": 9, "beta": BETA, "temperature": TEMPERATURE}
    targets = torch.zeros(NUM, dtype=torch.int64)
    leaf = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad(divergences(leaf, head, targets, other, **options)[:, :3].sum(), [leaf])
    nudge = torch.zeros_like(hidden)
    for place in [(0, 0), (3, 2), (5, 4)]:
        nudge.zero_()[place] = 1e-6
        up, down = (oracle(hidden + sign * nudge, head, other, 9).sum().item() for sign in (1, -1))
        assert grad[place].item() == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


def test_a_model_does_not_diverge_from_itself():
    hidden, head, _ = models(11, 11)
    leaf = hidden.clone().requires_grad_()
    targets = torch.zeros(NUM, dtype=torch.int64)
    found = divergences(leaf, head, targets, Other(hidden, head), below=11, beta=BETA)
    (grad,) = torch.autograd.grad(found[:, :3].sum(), [leaf])
    assert found[:, :3].abs().max() < 1e-12
    assert grad.abs().max() < 1e-12


def test_distributions_that_are_certain_have_finite_divergences_in_float32():
    hidden, head, other = models(11, 13, scale=1e4)
    leaf = hidden.float().requires_grad_()
    own = Head(head.weight.float(), head.bias.float())
    found = divergences(
        leaf,
        own,
        torch.zeros(NUM, dtype=torch.int64),
        Other(other.hidden.float(), Head(other.head.weight.float())),
        below=9,
        beta=BETA,
    )
    (grad,) = torch.autograd.grad(found[:, :3].sum(), [leaf])
    assert found.isfinite().all()
    assert grad.isfinite().all()


def test_one_chunk_of_logits_of_a_large_vocabulary_is_held_at_a_time():
    vocab, tokens, chunk = 131_072, 48, 4
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 4, generator=generator, requires_grad=True)
    other = Other(torch.randn(tokens, 3, generator=generator), Head(torch.randn(vocab, 3, generator=generator)))
    head, targets = Head(torch.randn(vocab, 4, generator=generator)), torch.zeros(tokens, dtype=torch.int64)
    with LiveMemory() as memory:
        divergences(hidden, head, targets, other, below=vocab, beta=BETA, chunk_size=chunk)[:, :3].sum().backward()
    of_chunk = chunk * vocab * 4
    assert memory.largest <= of_chunk
    # logprobs of both models, and what lies between them and the sums; all logits of one model would be 12 chunks
    assert memory.peak < 9 * of_chunk


def test_ids_that_one_of_the_models_does_not_have_are_refused():
    hidden, head, other = models(11, 9)
    with pytest.raises(ValueError, match="11 ids are compared"):
        divergences(hidden, head, torch.zeros(NUM, dtype=torch.int64), other, below=11, beta=BETA)


@pytest.mark.parametrize("below", [6, 9, 11])
def test_a_split_vocabulary_diverges_as_a_whole_one(pool, below):
    for errors in pool.run(split_cases.diverging, [(below,)] * 2):
        assert max(errors.values()) < 1e-10, errors


def test_a_split_vocabulary_diverges_from_several_models_as_a_whole_one(pool):
    for errors in pool.run(split_cases.diverging_from_several, [()] * 2):
        assert max(errors.values()) < 1e-10, errors


def test_gradients_need_no_small_tail():
    """A tail at its least is a constant."""
    hidden, head, other = models(11, 13)
    sure = Head(head.weight, torch.cat([head.bias[:9], torch.full((2,), -200.0, dtype=torch.float64)]))
    leaf = hidden.clone().requires_grad_()
    found = divergences(leaf, sure, torch.zeros(NUM, dtype=torch.int64), other, below=9, beta=BETA)
    (grad,) = torch.autograd.grad(found[:, 0].sum(), [leaf])
    p = (other.hidden @ other.head.weight.T).softmax(-1)
    q = (hidden @ sure.weight.T + sure.bias).softmax(-1)
    by_logits = q * p[:, :9].sum(1, keepdim=True)
    by_logits[:, :9] -= p[:, :9]
    torch.testing.assert_close(grad, by_logits @ sure.weight, rtol=1e-8, atol=1e-10)
    assert found[:, 4].max() < math.exp(-100)


@pytest.mark.parametrize("numbers", [[0, 1, 1, 0, 2, 1], [1] * NUM], ids=["mixed", "one of three"])
def test_each_token_is_compared_with_its_own_of_several_models(monkeypatch, numbers):
    hidden, head, _ = models(11, 11)
    widths = {"small": 3, "large": 4, "capped": 2}
    heads = {
        name: Head(draw(11 + place, width, seed=10 + place), None, CAP if name == "capped" else LogitTransform())
        for place, (name, width) in enumerate(widths.items())
    }
    monkeypatch.setattr(reads_module, "read_head", lambda files, start, stop: heads[files.model_name])
    chosen = [list(heads.values())[number] for number in numbers]
    states = torch.zeros(NUM, 4, dtype=torch.float64)
    for place, other in enumerate(chosen):
        states[place, : other.weight.shape[1]] = draw(other.weight.shape[1], seed=20 + place)
    read = divergences_from([HeadFiles(name, "float32") for name in heads], "states", "number", below=9, beta=BETA)
    columns = {"tokens": torch.arange(NUM), "states": states, "number": torch.tensor(numbers, dtype=torch.int32)}
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, head.weight, head.bias)]
    found = reads_module.position_reads(
        inputs[0],
        Head(inputs[1], inputs[2], CAP),
        Rows(torch.tensor([0, NUM]), columns),
        torch.arange(NUM),
        [read],
        temperature=TEMPERATURE,
        chunk_size=2,
    )["divergences"]

    def logits(place):
        other = chosen[place]
        return other.transform(states[place : place + 1, : other.weight.shape[1]] @ other.weight.T)

    def divergences_at(place):
        p = grouped(logits(place), 9)
        q = grouped(CAP(inputs[0][place : place + 1] @ inputs[1].T + inputs[2]), 9)
        m = BETA * p + (1 - BETA) * q
        kls = [(a * (a.log() - b.log())).sum(1) for a, b in ((p, q), (q, p), (p, m), (q, m))]
        return torch.stack([kls[0], kls[1], BETA * kls[2] + (1 - BETA) * kls[3]], 1)

    expected = torch.cat([divergences_at(place) for place in range(NUM)])
    torch.testing.assert_close(found[:, :3], expected, rtol=1e-10, atol=1e-12)
    own = torch.stack([(logits(place) / TEMPERATURE).log_softmax(-1)[0, place] for place in range(NUM)])
    torch.testing.assert_close(found[:, 5], own)
    weights = draw(NUM, 3, seed=7)
    grads = torch.autograd.grad((found[:, :3] * weights).sum(), inputs)
    for grad, by_oracle in zip(grads, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, by_oracle, rtol=1e-8, atol=1e-10)
