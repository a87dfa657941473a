"""The expected gradient of each KL term, over every token that could be drawn, beside that of the KL divergence."""

import pytest
import torch

from rl_algos.losses.terms import KLPenalty
from rl_algos.torch.sampled import Sampled, reference_kl, weighed
from rl_core.torch.loss import Rows

VOCABULARY = 6


def distributions():
    """Logits of the policy, with gradient, and logprobs of the reference and of an older policy, all some way apart."""
    generator = torch.Generator().manual_seed(0)
    logits, reference, older = (torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(3))
    return logits.requires_grad_(), reference.log_softmax(0), (logits.detach() + 0.5 * older).log_softmax(0)


def exact_gradient() -> torch.Tensor:
    logits, reference, _ = distributions()
    logprobs = logits.log_softmax(0)
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    return logits.grad


def expected_gradient(penalty: KLPenalty, drawn_from: str) -> torch.Tensor:
    """Sum over all tokens of the chance to draw it times the gradient of its term.

    Args:
        drawn_from: `policy`, or `older`, which `prev` and `generation` are then of.
    """
    logits, reference, older = distributions()
    logprobs = logits.log_softmax(0)
    before = logprobs.detach() if drawn_from == "policy" else older
    columns = {
        "tokens": torch.zeros(VOCABULARY, dtype=torch.int32),
        "loss_mask": torch.ones(VOCABULARY, dtype=torch.uint8),
        "prev_logprobs": before,
        "generation_logprobs": before,
        "advantages": torch.zeros(VOCABULARY, dtype=torch.float64),
    }
    rows = Rows(torch.arange(VOCABULARY + 1), columns)
    sampled = Sampled.of(logprobs, rows, on_policy=False)
    terms = weighed(penalty, reference_kl(penalty, sampled.logprobs, reference), sampled)
    (before.exp() * terms).sum().backward()
    return logits.grad


def refused_gradient(name: str) -> torch.Tensor:
    """As `expected_gradient`, of the two terms that `KLPenalty` refuses, written out."""
    logits, reference, _ = distributions()
    logprobs = logits.log_softmax(0)
    before = logprobs.detach()
    k1, k2 = logprobs - reference, (logprobs - reference).square() / 2
    (before.exp() * (k1 if name == "k1" else (logprobs - before).exp() * k2)).sum().backward()
    return logits.grad


def reversed_gradient() -> torch.Tensor:
    """That of KL(reference || policy)."""
    logits, reference, _ = distributions()
    (reference.exp() * (reference - logits.log_softmax(0))).sum().backward()
    return logits.grad


def error(found: torch.Tensor) -> float:
    exact = exact_gradient()
    return float((found - exact).norm() / exact.norm())


EXACT = 1e-12
INEXACT = None

# the relative error if tokens are drawn from the policy, and from an older one
CASES = {
    "k2": (KLPenalty(weight=1.0, estimator="k2"), 0.0, INEXACT),
    "k3": (KLPenalty(weight=1.0, estimator="k3"), INEXACT, INEXACT),
    "k1 unbiased": (KLPenalty(weight=1.0, estimator="k1", unbiased=True), 0.0, 0.0),
    "k3 unbiased": (KLPenalty(weight=1.0, estimator="k3", unbiased=True), 0.0, 0.0),
    "k2 from generation": (KLPenalty(weight=1.0, estimator="k2", from_generation=True), 0.0, 0.0),
    "k3 from generation": (KLPenalty(weight=1.0, estimator="k3", from_generation=True), INEXACT, INEXACT),
    "k3 unbiased, from generation": (
        KLPenalty(weight=1.0, estimator="k3", unbiased=True, from_generation=True),
        0.0,
        0.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_expected_gradient_is_exact_where_it_is_said_to_be_and_not_elsewhere(name):
    penalty, *errors = CASES[name]
    for drawn_from, expected in zip(("policy", "older"), errors, strict=True):
        found = error(expected_gradient(penalty, drawn_from))
        assert found > 0.05 if expected is INEXACT else found == pytest.approx(expected, abs=EXACT)


def test_k3_has_the_gradient_of_the_reversed_divergence():
    found = expected_gradient(KLPenalty(weight=1.0, estimator="k3"), "policy")
    torch.testing.assert_close(found, reversed_gradient(), rtol=0, atol=EXACT)


def test_what_is_refused_has_no_gradient_or_a_wrong_one():
    assert refused_gradient("k1").abs().max() < EXACT
    assert error(refused_gradient("k2 unbiased")) > 0.05


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", False), ("k2", True)])
def test_terms_with_a_wrong_gradient_are_refused(estimator, unbiased):
    with pytest.raises(ValueError, match=f"gradient.*{estimator}|{estimator}.*gradient"):
        KLPenalty(weight=0.1, estimator=estimator, unbiased=unbiased)
