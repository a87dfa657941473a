"""Several passes over the rollouts of a step, against the updates worked out by hand."""

import numpy as np
import pytest
import torch

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.loop import train
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.training.batch import passes
from rl_algos.torch.policy_loss import compute
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights
from rl_core.torch.loss import Rows

PROMPTS = [Prompt(f"p{i}", (), np.arange(2, dtype=np.int32), "math", {"answer": i}, "sums") for i in range(40)]
VOCABULARY, RATE, SEED, CLIP = 10, 8.0, 7, 0.2


class Unigram(FakeModel):
    """A policy that draws every token from the same distribution, and learns its logits by plain gradient descent."""

    def __init__(self):
        super().__init__()
        self.logits = torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True)
        self.num_infers = 0

    def infer(self, batch, reads, *, reference=False, temperature=1.0):
        assert [read.name for read in reads] == ["logprobs"]
        self.num_infers += 1
        with torch.no_grad():
            return Batch({"logprobs": batch.ragged("tokens").like(self._logprobs(batch).numpy())})

    def train_step(self, batch, loss):
        self.calls.append(("train_step", batch))
        columns = {name: torch.from_numpy(getattr(batch[name], "values", batch[name])) for name in batch}
        rows = Rows(torch.from_numpy(batch.ragged("tokens").offsets), columns)
        value = compute(loss, {"logprobs": self._logprobs(batch)}, rows).loss(loss.totals(batch))
        [gradient] = torch.autograd.grad(value, [self.logits])
        with torch.no_grad():
            self.logits -= RATE * gradient
        self.num_steps += 1
        return {"loss": Metric(value.item()), "num_tokens": Metric(1.0, reduction="sum")}

    def _logprobs(self, batch):
        tokens = torch.from_numpy(batch.ragged("tokens").values.astype(np.int64))
        return torch.log_softmax(self.logits, 0)[tokens]


def even_share(prompt, tokens):
    return float(np.mean(tokens % 2 == 0))


def run_loop(run=None, *, model=None, rows=4, **settings):
    defaults = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 2, "seed": SEED}
    config = GRPOConfig(**defaults | settings)
    run, policy = run or FakeRun(), model or Unigram()
    source = FakeRolloutSource(PROMPTS, even_share, num_generations=4, vocab_size=VOCABULARY)
    validation = Validation([], SamplingParams(max_new_tokens=3), config)
    steps = RolloutSteps(config, source, FakeWeights(policy), validation, run)
    train(config, Objective(PolicyLoss()), policy=policy, steps=steps, rows_per_minibatch=rows)
    return run, policy


def by_hand(groups_by_step, *, num_iterations, rows):
    """The logits after all updates, and how many tokens the clipping left without a gradient."""
    logits, num_clipped = np.zeros(VOCABULARY), 0

    def logprobs():
        return logits - np.log(np.exp(logits).sum())

    for step, groups in groups_by_step.items():
        rewards = np.stack([group.rewards() for group in groups])
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
        advantages = np.where(np.ptp(rewards, axis=1)[:, None] > 0, advantages, 0).ravel()
        # a prompt has two tokens
        sampled = [row[2:] for group in groups for row in group.columns.ragged("tokens")]
        before = logprobs()
        for number in range(num_iterations):
            order = np.random.default_rng((SEED, step, number)).permutation(len(sampled))
            for start in range(0, len(sampled), rows):
                part, gradient = order[start : start + rows], np.zeros(VOCABULARY)
                now, tokens = logprobs(), sum(len(sampled[row]) for row in part)
                for row in part:
                    for token in sampled[row]:
                        ratio = np.exp(now[token] - before[token])
                        unclipped = -advantages[row] * ratio
                        clipped = -advantages[row] * np.clip(ratio, 1 - CLIP, 1 + CLIP)
                        if clipped > unclipped:
                            num_clipped += 1
                            continue
                        gradient += unclipped * ((np.arange(VOCABULARY) == token) - np.exp(now)) / tokens
                logits = logits - RATE * gradient
    return logits, num_clipped


@pytest.mark.parametrize("rows", [3, 8])
def test_updates_of_several_passes_are_those_by_hand(rows):
    run, policy = run_loop(num_iterations=2, rows=rows)
    expected, num_clipped = by_hand(run.groups, num_iterations=2, rows=rows)
    assert num_clipped
    np.testing.assert_allclose(policy.logits.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    once, _ = by_hand(run.groups, num_iterations=1, rows=rows)
    assert np.abs(expected - once).max() > 0.1
    # before the first pass of each step, and not again
    assert policy.num_infers == 2


def test_every_pass_trains_on_every_rollout_in_an_order_of_its_own():
    _, policy = run_loop(model=FakeModel(), max_num_steps=1, num_iterations=3)
    parts = [batch for name, batch in policy.calls if name == "train_step"]
    assert [len(part) for part in parts] == [4] * 6
    rows = [tuple(map(tuple, part.ragged("tokens").values.reshape(len(part), -1))) for part in parts]
    seen = [rows[start] + rows[start + 1] for start in (0, 2, 4)]
    assert len({tuple(sorted(each)) for each in seen}) == 1
    assert len(set(seen)) == 3


def test_a_single_pass_is_in_the_order_of_the_rollouts():
    batch = Batch({"tokens": Ragged.from_rows([np.array([i]) for i in range(5)], np.int32)})
    parts = list(passes(batch, 2, count=1, seed=(1, 2)))
    assert [part.ragged("tokens").values.tolist() for part in parts] == [[0, 1], [2, 3], [4]]


def test_a_run_that_is_resumed_takes_the_same_passes(tmp_path):
    whole = run_loop(model=FakeModel(), num_iterations=2, max_num_steps=3)[1]
    first = FakeRun(tmp_path, end_after=1)
    run_loop(first, model=FakeModel(), num_iterations=2, max_num_steps=3)
    resumed = run_loop(FakeRun(tmp_path), model=FakeModel(), num_iterations=2, max_num_steps=3)[1]
    mine, theirs = ([batch for name, batch in each.calls if name == "train_step"] for each in (resumed, whole))
    assert len(mine) == 8
    for a, b in zip(mine, theirs[4:], strict=True):
        for name in ("tokens", "advantages", "prev_logprobs"):
            np.testing.assert_array_equal(getattr(a[name], "values", a[name]), getattr(b[name], "values", b[name]))
