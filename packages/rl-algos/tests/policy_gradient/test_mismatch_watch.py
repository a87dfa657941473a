"""A large mismatch is examined on rows of the next step, with the policy that has not learned from them."""

import logging
from itertools import pairwise

import numpy as np
import pytest

from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.mismatch_watch import NUM_ROWS, PERIOD, MismatchWatch
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.rollouts.generation import SamplingParams
from rl_core.testing.torch.reference_model import processed_logprobs

VOCABULARY, LENGTH, NUM_IN_BATCH = 40, 20, 32
LOGITS = 2 * np.random.default_rng(0).standard_normal((VOCABULARY, VOCABULARY))
"""Logits of the next token by the last one."""


class Bigrams:
    """A policy whose logprobs are known in closed form."""

    def __init__(self):
        self.num_passes = 0

    def infer(self, batch, reads, *, temperature):
        self.num_passes += 1
        kept = reads[0].token_filter
        limits = {} if kept is None else {"top_k": kept.top_k, "top_p": kept.top_p, "min_p": kept.min_p}
        rows = [logprobs(row, temperature=temperature, **limits) for row in batch.ragged("tokens")]
        return Batch({"logprobs": Ragged.from_rows(rows, np.float32)})


def logprobs(row, **sampling):
    params = SamplingParams(max_new_tokens=1, **sampling)
    found = [processed_logprobs(LOGITS[before], params)[token] for before, token in pairwise(row)]
    return np.array([0.0, *found], np.float32)


def batch_of(**sampling):
    random, params = np.random.default_rng(1), SamplingParams(max_new_tokens=1, **sampling)
    rows = []
    for _ in range(NUM_IN_BATCH):
        row = [int(random.integers(VOCABULARY))]
        while len(row) < LENGTH:
            chances = np.exp(processed_logprobs(LOGITS[row[-1]], params))
            row.append(int(random.choice(VOCABULARY, p=chances / chances.sum())))
        rows.append(np.array(row, np.int32))
    mask = [np.array([0] + [1] * (LENGTH - 1), np.uint8)] * NUM_IN_BATCH
    generation = [logprobs(row, **sampling) for row in rows]
    versions = [np.full(LENGTH, 3, np.int32)] * NUM_IN_BATCH
    columns = {"tokens": rows, "loss_mask": mask, "generation_logprobs": generation, "weight_versions": versions}
    return Batch({name: Ragged.from_rows(each) for name, each in columns.items()})


def step(kl):
    return {"mismatch/kl": Metric(kl)}


@pytest.mark.parametrize(
    ("sampling", "cause", "key"),
    [
        ({"temperature": 0.7}, "temperature", "policy.generation.temperature"),
        ({"top_p": 0.9}, "top_p", "policy.generation.top_p"),
        ({"top_k": 20}, "top_k", "policy.generation.top_k"),
    ],
)
def test_the_setting_that_one_side_lacks_is_in_the_log_and_the_metrics(caplog, sampling, cause, key):
    watch, policy = MismatchWatch(), Bigrams()
    watch.observe(step(0.2))
    with caplog.at_level(logging.WARNING):
        watch.examine(batch_of(**sampling), policy, PolicyLoss())
    metrics = watch.observe(step(0.2))
    first = max(metrics, key=metrics.get)
    assert first == f"mismatch/closed/{cause}"
    assert metrics[first] > 0.95
    assert key in caplog.text
    assert f"{NUM_ROWS} rows" in caplog.text


def test_a_mismatch_that_stays_is_examined_once_in_a_period():
    watch, policy, batch = MismatchWatch(), Bigrams(), batch_of(temperature=0.7)
    watch.observe(step(0.001))
    watch.examine(batch, policy, PolicyLoss())
    assert policy.num_passes == 0
    examined = []
    for number in range(2 * PERIOD):
        watch.observe(step(0.2))
        before = policy.num_passes
        watch.examine(batch, policy, PolicyLoss())
        if policy.num_passes > before:
            examined.append(number)
    assert examined == [0, PERIOD]


def test_a_resumed_watch_examines_as_the_interrupted_one_would_have():
    first, second, batch = MismatchWatch(), MismatchWatch(), batch_of(temperature=0.7)
    first.observe(step(0.2))
    second.restore(first.state())
    for watch in (first, second):
        watch.examine(batch, Bigrams(), PolicyLoss())
    assert first.observe(step(0.2)) == second.observe(step(0.2))
    assert first.state() == second.state()


def test_nothing_is_remembered_of_a_small_mismatch():
    watch = MismatchWatch()
    watch.observe(step(0.001))
    assert watch.state() == {}
