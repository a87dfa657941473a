"""Losses over targets by position and their gradients, against the formulas in float64."""

import numpy as np
import pytest
import torch

from rl_algos.losses.targets import (
    ADVANTAGES,
    CLIP_HIGH,
    CLIP_LOW,
    LOSS_SUM,
    RATIO_MASK,
    SAMPLING_LOGPROBS,
    SUMMED_SURROGATES,
    TARGETS,
    WEIGHTS,
    TargetNLLLoss,
    TargetPolicyLoss,
    TargetSurrogateLoss,
)
from rl_algos.torch.targets import compute_nll, compute_policy, compute_surrogate
from rl_core.model import UNDIVIDED
from rl_core.torch.loss import Rows

LENGTHS = (4, 6, 2)


def rows_of(seed: int = 0, k: int = 1) -> tuple[torch.Tensor, Rows]:
    """Return logprobs `[tokens, k]` with gradient, and rows whose first tokens have no target."""
    random = np.random.default_rng(seed)
    total, offsets = sum(LENGTHS), np.cumsum([0, *LENGTHS])
    targets = random.integers(0, 9, (total, k))
    targets[offsets[:-1]] = -1
    logprobs = np.where(targets < 0, 0.0, -random.exponential(1.5, (total, k)))
    columns = {
        TARGETS: targets.astype(np.int32),
        WEIGHTS: random.normal(size=(total, k)),
        SAMPLING_LOGPROBS: np.where(targets[:, 0] < 0, 0.0, logprobs[:, 0] + 0.4 * random.normal(size=total)),
        ADVANTAGES: random.normal(size=total),
        CLIP_LOW: random.uniform(0.6, 0.9, total),
        CLIP_HIGH: random.uniform(1.1, 1.4, total),
        RATIO_MASK: random.integers(0, 2, total).astype(float),
        "loss_mask": (targets[:, 0] >= 0).astype(np.uint8),
    }
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return torch.tensor(logprobs, requires_grad=True), Rows(torch.from_numpy(offsets), tensors)


def oracle(objective: str, logp: np.ndarray, frozen: np.ndarray, rows: Rows, beta: float) -> float:
    """Compute an objective token by token; `frozen` are the logprobs under a stop-gradient."""
    columns = {name: column.numpy() for name, column in rows.columns.items()}
    total = 0.0
    for start, end in zip(rows.host_offsets, rows.host_offsets[1:], strict=False):
        masked = [t for t in range(start + 1, end) if columns[RATIO_MASK][t] != 0]
        sequence = np.mean([frozen[t] - columns[SAMPLING_LOGPROBS][t] for t in masked]) if masked else 0.0
        for t in range(start + 1, end):
            q, a = columns[SAMPLING_LOGPROBS][t], columns[ADVANTAGES][t]
            low, high = columns[CLIP_LOW][t], columns[CLIP_HIGH][t]
            r = np.exp(logp[t] - q)
            match objective:
                case "importance_sampling":
                    total -= r * a
                case "ppo":
                    total -= min(r * a, np.clip(r, low, high) * a)
                case "cispo":
                    total -= np.clip(np.exp(frozen[t] - q), low, high) * logp[t] * a
                case "gspo":
                    s = np.exp(sequence + logp[t] - frozen[t])
                    total -= min(s * a, np.clip(s, low, high) * a)
                case "dro":
                    total -= logp[t] * a - beta / 2 * (logp[t] - q) ** 2
    return total


@pytest.mark.parametrize("objective", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_policy_losses_and_their_gradients_are_those_of_the_formulas(objective):
    logprobs, rows = rows_of()
    loss = TargetPolicyLoss(objective, beta=0.3)
    sums = compute_policy(loss, {"logprobs_at": logprobs}, rows)
    at = logprobs.detach().numpy()[:, 0]
    assert sums.objective[UNDIVIDED].item() == pytest.approx(oracle(objective, at, at, rows, 0.3), rel=1e-12)
    assert sums.metrics[LOSS_SUM].value.item() == sums.objective[UNDIVIDED].item()
    sums.objective[UNDIVIDED].backward()
    for token in range(len(at)):
        nudge = np.zeros(len(at))
        nudge[token] = 1e-6
        up, down = (oracle(objective, at + sign * nudge, at, rows, 0.3) for sign in (1, -1))
        assert logprobs.grad[token, 0].item() == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)
    assert set(loss.columns) <= set(rows.columns)


def test_the_likelihood_is_the_weighted_sum_over_all_targets_of_all_positions():
    logprobs, rows = rows_of(k=3)
    value = compute_nll(TargetNLLLoss(), {"logprobs_at": logprobs}, rows).objective[UNDIVIDED]
    value.backward()
    weights = rows[WEIGHTS]
    assert value.item() == pytest.approx(-(weights * logprobs.detach()).sum().item(), rel=1e-12)
    assert torch.equal(logprobs.grad, -weights)


def test_a_target_without_weight_or_advantage_may_be_impossible():
    logprobs, rows = rows_of()
    impossible = logprobs.detach().clone()
    impossible[2] = -torch.inf
    impossible.requires_grad_()
    zeros = {name: rows[name].clone() for name in (WEIGHTS, ADVANTAGES)}
    for column in zeros.values():
        column[2] = 0
    rows = Rows(rows.offsets, {**rows.columns, **zeros})
    for loss, compute in ((TargetNLLLoss(), compute_nll), (TargetPolicyLoss("ppo"), compute_policy)):
        value = compute(loss, {"logprobs_at": impossible}, rows).objective[UNDIVIDED]
        (gradient,) = torch.autograd.grad(value, impossible)
        assert torch.isfinite(value)
        assert gradient[2].item() == 0


@pytest.mark.parametrize("name", SUMMED_SURROGATES)
def test_a_surrogate_is_summed_over_the_targets(name):
    # Rows are separate, so the sum of a batch is the sum of its rows.
    logprobs, rows = rows_of(3)
    loss = TargetSurrogateLoss(SUMMED_SURROGATES[name]())
    whole = compute_surrogate(loss, {"logprobs_at": logprobs}, rows).objective[UNDIVIDED]
    parts = 0.0
    for start, end in zip(rows.host_offsets, rows.host_offsets[1:], strict=False):
        own = {each: column[start:end] for each, column in rows.columns.items()}
        row = Rows(torch.tensor([0, end - start]), own)
        parts += compute_surrogate(loss, {"logprobs_at": logprobs[start:end]}, row).objective[UNDIVIDED].item()
    assert whole.item() == pytest.approx(parts, rel=1e-12)
    if name == "reinforce":
        targets = rows[TARGETS][:, 0] >= 0
        expected = -(rows[ADVANTAGES] * logprobs.detach()[:, 0])[targets].sum()
        assert whole.item() == pytest.approx(expected.item(), rel=1e-12)
