"""Preference losses in plain Python and float64, each from its paper's formula."""

import math

ODDS_BOUND = -1e-6


def logistic(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_logistic(x):
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def summed(row, name):
    return math.fsum(value for value, masked in zip(row[name], row["loss_mask"], strict=True) if masked)


def length(row):
    return max(1, sum(row["loss_mask"]))


def of_response(row, *, average, reference):
    """What a term compares of one response."""
    value = summed(row, "logprobs") - (summed(row, "ref_logprobs") if reference else 0.0)
    return value / length(row) if average else value


def dpo(c, r, longer, beta=0.1, label_smoothing=0.0, length_penalty=0.0):
    h = beta * (c - r) + length_penalty * longer
    return -(1 - label_smoothing) * log_logistic(h) - label_smoothing * log_logistic(-h)


def robust_dpo(c, r, _longer, beta=0.1, label_smoothing=0.1):
    h, s = beta * (c - r), label_smoothing
    return (-(1 - s) * log_logistic(h) + s * log_logistic(-h)) / (1 - 2 * s)


def ipo(c, r, _longer, beta=0.1):
    return ((c - r) - 1 / (2 * beta)) ** 2


def hinge(c, r, _longer, beta=0.1):
    return max(0.0, 1 - beta * (c - r))


def simpo(c, r, _longer, beta=2.0, gamma=1.0):
    return -log_logistic(beta * (c - r) - gamma)


def cpo(c, r, _longer, beta=0.1):
    return -log_logistic(beta * (c - r))


def orpo(c, r, _longer, beta=1.0):
    def log_odds(mean):
        mean = min(mean, ODDS_BOUND)
        return mean - math.log(-math.expm1(mean))

    return -log_logistic(beta * (log_odds(c) - log_odds(r)))


PAIR_ORACLES = {
    "dpo": dpo,
    "robust-dpo": robust_dpo,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
}


def pair_loss(pairs, name, *, weight, sft_weight, average, sft_average, reference, **settings):
    """Mean over pairs, each a chosen and a rejected row."""
    total = 0.0
    for chosen, rejected in pairs:
        c, r = (of_response(row, average=average, reference=reference) for row in (chosen, rejected))
        total += weight * PAIR_ORACLES[name](c, r, length(chosen) - length(rejected), **settings)
        total -= sft_weight * summed(chosen, "logprobs") / (length(chosen) if sft_average else 1)
    return total / len(pairs)


def kto_loss(rows, kl, *, beta, desirable_weight, undesirable_weight):
    """`lambda_y - v(x, y)` of the paper, averaged."""
    total = 0.0
    for row in rows:
        reward = of_response(row, average=False, reference=True)
        if row["verdict"]:
            total += desirable_weight - desirable_weight * logistic(beta * (reward - kl))
        else:
            total += undesirable_weight - undesirable_weight * logistic(beta * (kl - reward))
    return total / len(rows)
