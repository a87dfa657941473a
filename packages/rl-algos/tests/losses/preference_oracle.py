"""Preference losses in plain Python and float64, each from its paper's formula."""

import math

ODDS_BOUND = -1e-6
MAX_EXPONENT = 40.0


def logistic(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_logistic(x):
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def summed(row, name):
    return math.fsum(value for value, masked in zip(row[name], row["loss_mask"], strict=True) if masked)


def length(row):
    return max(1, sum(row["loss_mask"]))


def dpo(c, r, pair, beta=0.1, label_smoothing=0.0, length_penalty=0.0, margin_weight=0.0):
    h = beta * (c - r) + length_penalty * (length(pair[0]) - length(pair[1])) - margin_weight * pair[0]["margin"]
    return -(1 - label_smoothing) * log_logistic(h) - label_smoothing * log_logistic(-h)


def robust_dpo(c, r, _pair, beta=0.1, label_smoothing=0.1):
    h, s = beta * (c - r), label_smoothing
    return (-(1 - s) * log_logistic(h) + s * log_logistic(-h)) / (1 - 2 * s)


def ipo(c, r, _pair, beta=0.1):
    return ((c - r) - 1 / (2 * beta)) ** 2


def hinge(c, r, _pair, beta=0.1):
    return max(0.0, 1 - beta * (c - r))


def simpo(c, r, _pair, beta=2.0, gamma=1.0):
    return -log_logistic(beta * (c - r) - gamma)


def cpo(c, r, _pair, beta=0.1):
    return -log_logistic(beta * (c - r))


def orpo(c, r, _pair, beta=1.0):
    def log_odds(mean):
        mean = min(mean, ODDS_BOUND)
        return mean - math.log(-math.expm1(mean))

    return -log_logistic(beta * (log_odds(c) - log_odds(r)))


def exo(c, r, _pair, beta=0.1, label_smoothing=1e-3):
    total = 0.0
    for q, p in ((logistic(beta * (c - r)), 1 - label_smoothing), (logistic(beta * (r - c)), label_smoothing)):
        total += q * (math.log(q) - math.log(p)) if q else 0.0
    return total


def nca(c, r, _pair, beta=0.1):
    return -log_logistic(beta * c) - 0.5 * (log_logistic(-beta * c) + log_logistic(-beta * r))


def bco(c, r, _pair, beta=0.1):
    return -log_logistic(beta * c) - log_logistic(-beta * r)


def sppo(c, r, _pair, beta=0.1):
    return (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2


def apo_zero(c, r, _pair, beta=0.1):
    return 1 - logistic(beta * c) + logistic(beta * r)


def apo_down(c, r, _pair, beta=0.1):
    return logistic(beta * c) + 1 - logistic(beta * (c - r))


def discopop(c, r, _pair, beta=0.1, tau=0.05):
    h = beta * (c - r)
    modulation = logistic(h / tau)
    return -(1 - modulation) * log_logistic(h) + modulation * math.exp(-h)


def aot(pairs, logratio, beta=0.1, label_smoothing=0.0):
    """Margins of all pairs: the k-th smallest of the policy with the k-th smallest of the reference."""
    own, ref = (
        sorted(logratio(chosen, name) - logratio(rejected, name) for chosen, rejected in pairs)
        for name in ("logprobs", "ref_logprobs")
    )
    return math.fsum(dpo(u, v, pairs[0], beta, label_smoothing) for u, v in zip(own, ref, strict=True)) / len(pairs)


def aot_unpaired(pairs, logratio, beta=0.1, label_smoothing=0.0):
    better, worse = (
        sorted(logratio(row, "logprobs") - logratio(row, "ref_logprobs") for row in side)
        for side in zip(*pairs, strict=True)
    )
    return math.fsum(dpo(c, r, pairs[0], beta, label_smoothing) for c, r in zip(better, worse, strict=True)) / len(
        pairs
    )


BATCH_ORACLES = {"aot": aot, "aot-unpaired": aot_unpaired}

PAIR_ORACLES = {
    "dpo": dpo,
    "robust-dpo": robust_dpo,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
    "exo": exo,
    "nca": nca,
    "bco": bco,
    "sppo": sppo,
    "apo-zero": apo_zero,
    "apo-down": apo_down,
    "discopop": discopop,
}


def derivative(d, divergence, alpha):
    """f' of the ratio exp(d)."""
    if divergence == "forward_kl":
        return 1 - math.exp(min(-d, MAX_EXPONENT))
    if divergence == "js_divergence":
        return math.log(2) + log_logistic(d)
    if divergence == "alpha_divergence" and alpha != 1:
        return (math.exp(min((alpha - 1) * d, MAX_EXPONENT)) - 1) / (alpha - 1)
    return d


def weighted(row, name, shared, ld_alpha):
    """The sum of logprobs, those after the first `shared` tokens times alpha."""
    values = [value for value, masked in zip(row[name], row["loss_mask"], strict=True) if masked]
    return math.fsum(value * (1.0 if place < shared else ld_alpha) for place, value in enumerate(values))


def policy_weight(row):
    logs = [
        own - math.log(squares)
        for own, squares, masked in zip(row["logprobs"], row["collision"], row["loss_mask"], strict=True)
        if masked
    ]
    return math.exp(math.fsum(logs) / len(logs))


def term_mean(
    pairs, name, *, average, reference, divergence="reverse_kl", alpha=0.5, ld_alpha=None, weights=None, **of_term
):
    """Mean over pairs, each a chosen and a rejected row, of one term."""
    ld_alpha = 1.0 if ld_alpha is None else ld_alpha
    shared = {id(row): min(map(length, pair)) for pair in pairs for row in pair}

    def logratio(row, column):
        return weighted(row, column, shared[id(row)], ld_alpha)

    if name in BATCH_ORACLES:
        return BATCH_ORACLES[name](pairs, logratio, **of_term)
    total = 0.0
    for place, pair in enumerate(pairs):
        scores = []
        for row in pair:
            value = logratio(row, "logprobs") - (logratio(row, "ref_logprobs") if reference else 0.0)
            scores.append(derivative(value, divergence, alpha) / (length(row) if average else 1))
        total += (1.0 if weights is None else weights[place]) * PAIR_ORACLES[name](*scores, pair, **of_term)
    return total / len(pairs)


def likelihood(pairs, *, average):
    """Mean negative log-likelihood of the chosen rows."""
    return -math.fsum(summed(row, "logprobs") / (length(row) if average else 1) for row, _ in pairs) / len(pairs)


def kto_loss(rows, kl, *, beta, desirable_weight, undesirable_weight):
    """`lambda_y - v(x, y)` of the paper, averaged."""
    total = 0.0
    for row in rows:
        reward = summed(row, "logprobs") - summed(row, "ref_logprobs")
        if row["verdict"]:
            total += desirable_weight - desirable_weight * logistic(beta * (reward - kl))
        else:
            total += undesirable_weight - undesirable_weight * logistic(beta * (kl - reward))
    return total / len(rows)
