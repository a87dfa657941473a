"""Preference losses of TRL that `rl config import` converts have the same value here, field by field."""

import json
import pickle
import subprocess

import numpy as np
import pytest
import yaml
from runs import python_of

from rl_algos.dpo.loss import preference_loss_of
from rl_core.plugins import POLICIES
from rl_launch.foreign.importing import import_config
from rl_launch.run_config.reading import read_plan

# chosen responses are of one length: TRL averages a likelihood over the tokens of a batch, and rl over each response
LENGTHS = np.array([6, 6, 6, 3, 5, 8])
PAIRS = 3


def softplus(x):
    return np.logaddexp(0, x)


def theirs(fields, policy, reference):
    """The loss of TRL by its own names, for sums of logprobs `[chosen, then rejected]`."""
    kind, beta = fields.get("loss_type", "sigmoid"), fields.get("beta", 0.1)
    kinds = kind if isinstance(kind, list) else [kind]
    weights = fields.get("loss_weights") or [1.0] * len(kinds)
    smoothing = fields.get("label_smoothing", 0.0)
    logratio = policy - reference
    averaged = logratio / LENGTHS
    likelihood = -policy[:PAIRS].sum() / LENGTHS[:PAIRS].sum()
    means = policy / LENGTHS

    def margin(values):
        return beta * (values[:PAIRS] - values[PAIRS:])

    def odds():
        log_odds = means - np.log1p(-np.exp(means))
        return softplus(-(log_odds[:PAIRS] - log_odds[PAIRS:]))

    h = margin(logratio)
    terms = {
        "sigmoid": lambda: (1 - smoothing) * softplus(-h) + smoothing * softplus(h),
        "sigmoid_norm": lambda: softplus(-margin(averaged)),
        "robust": lambda: ((1 - smoothing) * softplus(-h) - smoothing * softplus(h)) / (1 - 2 * smoothing),
        "hinge": lambda: np.maximum(0, 1 - h),
        "ipo": lambda: (margin(averaged) / beta - 1 / (2 * beta)) ** 2,
        "sft": lambda: likelihood,
        "cpo": lambda: softplus(-margin(policy)) + fields.get("cpo_alpha", 1.0) * likelihood,
        "simpo": lambda: (
            softplus(-(margin(means) - fields.get("simpo_gamma", 0.5))) + fields.get("cpo_alpha", 1.0) * likelihood
        ),
        "orpo": lambda: likelihood + beta * odds(),
    }
    total = sum(weight * np.mean(terms[name]()) for name, weight in zip(kinds, weights, strict=True))
    return total + fields.get("rpo_alpha", 0.0) * likelihood


OURS = """
import json, pickle, sys
import numpy as np
import torch
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

losses, logprobs, reference, lengths = pickle.load(sys.stdin.buffer)
pairs = len(lengths) // 2
columns = {
    "tokens": torch.zeros(sum(lengths), dtype=torch.int32),
    "loss_mask": torch.ones(sum(lengths), dtype=torch.uint8),
    "ref_logprobs": torch.from_numpy(reference),
    "pair": torch.arange(2 * pairs) % pairs,
    "is_chosen": (torch.arange(2 * pairs) < pairs).to(torch.uint8),
}
offsets = torch.from_numpy(np.cumsum([0, *lengths]))
values = []
for loss in losses:
    rows = Rows(offsets, {name: columns[name] for name in ("tokens", *loss.columns)})
    sums = resolve(loss.implementation)(loss, {"logprobs": torch.from_numpy(logprobs)}, rows)
    values.append(float(sums.loss({"pairs": pairs})))
print(json.dumps(values))
"""
"""Computes the losses in the trainer's environment, which has torch."""


def converted(fields, folder):
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "x/y", "dataset_name": "a/b", **fields}))
    found = import_config(path, "trl", algorithm="dpo")
    assert found.features == {}
    return preference_loss_of(read_plan(found.recipe).config.dpo)


FIELDS = [
    {},
    {"beta": 0.4, "label_smoothing": 0.2},
    {"loss_type": "sigmoid_norm", "beta": 2.0},
    {"loss_type": "robust"},
    {"loss_type": "robust", "label_smoothing": 0.3},
    {"loss_type": "hinge", "beta": 0.3},
    {"loss_type": "ipo", "beta": 0.3},
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.3]},
    {"loss_type": ["sft", "ipo"], "loss_weights": [0.3, 0.6], "beta": 0.2},
    {"rpo_alpha": 0.7},
    {"loss_type": "cpo", "beta": 0.3},
    {"loss_type": "cpo", "cpo_alpha": 0.0},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "cpo_alpha": 0.5},
    {"loss_type": "simpo"},
    {"loss_type": "orpo", "beta": 0.2},
]


def test_preference_losses_of_trl_have_the_same_values(tmp_path):
    random = np.random.default_rng(3)
    logprobs = -random.exponential(1, LENGTHS.sum()) - 0.01
    reference = logprobs + random.normal(0, 0.5, LENGTHS.sum())
    starts = np.cumsum([0, *LENGTHS[:-1]])
    sums = [np.add.reduceat(values, starts) for values in (logprobs, reference)]
    given = pickle.dumps(([converted(fields, tmp_path) for fields in FIELDS], logprobs, reference, LENGTHS.tolist()))
    python = python_of(POLICIES, "dtensor")
    ours = json.loads(subprocess.run([python, "-c", OURS], input=given, capture_output=True, check=True).stdout)
    for fields, value in zip(FIELDS, ours, strict=True):
        assert value == pytest.approx(theirs(fields, *sums), rel=1e-9), fields
