"""Rollouts that older weights sampled, and given responses among the rollouts."""

import dataclasses
from functools import partial
from itertools import product

import numpy as np
import pytest
from byte_tokenizer import byte_level
from rollouts_builder import make_prompt, make_rollout, make_split_rollout
from test_distillation_plugin import config, problems
from torch_model import TorchModel

from rl_algos.distillation.algorithm import train, with_state_weights
from rl_algos.distillation.config import DistillationConfig
from rl_algos.distillation.plugin import OFFLINE, PLUGIN
from rl_algos.distillation.teachers import Teachers
from rl_algos.losses.distillation import STATE_WEIGHTS, DistillationLoss, Divergence
from rl_algos.losses.importance import ImportanceCorrection, importance_weights
from rl_algos.losses.mask import DEMONSTRATION
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.training.batch import build_batch
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS, topk
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights

LENGTH, VOCABULARY = 3, 3
TOKENS = np.array(list(product(range(VOCABULARY), repeat=LENGTH)))


def chains():
    """The distribution of the next token after each token, and those of first tokens."""
    random = np.random.default_rng(3)
    return random.dirichlet(np.ones(VOCABULARY), size=(2, VOCABULARY + 1))


def logprobs_of(chain):
    """Of every sequence, by token."""
    before = np.concatenate([np.full((len(TOKENS), 1), VOCABULARY), TOKENS[:, :-1]], axis=1)
    return np.log(chain[before, TOKENS])


@pytest.mark.parametrize(("level", "places"), [("sequence", LENGTH), ("token", 2)])
def test_the_weights_of_the_tokens_before_give_the_expectation_over_the_policys_own_rollouts(level, places):
    """With a product of ratios at every place; with the last ratio at the second, whose state is a single token."""
    policy, older = (logprobs_of(chain) for chain in chains())
    column = {name: Ragged.from_rows(list(rows), np.float64) for name, rows in (("prev", policy), ("old", older))}
    mask = column["prev"].like(np.ones(TOKENS.size, np.uint8))
    batch = Batch({"loss_mask": mask, "prev_logprobs": column["prev"], "generation_logprobs": column["old"]})
    correction = ImportanceCorrection(level=level)
    weights = importance_weights(correction, batch, of_states=True).values.reshape(TOKENS.shape)
    # A term of each place that depends on the tokens before it.
    keys = np.cumsum(np.concatenate([np.ones((len(TOKENS), 1)), TOKENS[:, :-1] * 7.0 ** np.arange(1, LENGTH)], 1), 1)
    terms = np.sin(keys)
    by_older, by_policy = (np.exp(each.sum(1))[:, None] for each in (older, policy))
    expected = (by_policy * terms).sum(0)
    np.testing.assert_allclose((by_older * weights * terms).sum(0)[:places], expected[:places], rtol=1e-9)
    assert not np.allclose((by_older * terms).sum(0)[1:], expected[1:], rtol=1e-3)


def test_rollouts_sampled_from_some_tokens_count_as_the_students_own_in_the_states_that_they_reach():
    chain = chains()[0]
    kept = np.where(chain > chain.min(1, keepdims=True), chain, 0.0)
    kept /= kept.sum(1, keepdims=True)
    policy = logprobs_of(chain)
    with np.errstate(divide="ignore"):
        sampled = logprobs_of(kept)
    reached = np.flatnonzero(np.isfinite(sampled).all(1))
    columns = {
        name: Ragged.from_rows(list(values[reached]), np.float64)
        for name, values in (("prev_logprobs", policy), ("generation_logprobs", sampled))
    }
    mask = columns["prev_logprobs"].like(np.ones(len(reached) * LENGTH, np.uint8))
    batch = Batch({"loss_mask": mask, **columns})
    weights = importance_weights(ImportanceCorrection(level="sequence"), batch, of_states=True).values
    last = weights.reshape(-1, LENGTH)[:, -1] * np.exp(sampled[reached].sum(1))
    for state in {tuple(tokens) for tokens in TOKENS[reached, :-1]}:
        is_there = (TOKENS[reached, :-1] == state).all(1)
        own = np.exp(policy[(TOKENS[:, :-1] == state).all(1)][0, :-1].sum())
        assert last[is_there].sum() == pytest.approx(own, rel=1e-9)


def test_weights_are_truncated_and_sequences_rejected_as_in_the_policy_loss():
    d = [np.log([0.5, 4.0, 2.0]), np.log([1.0, 1.0, 9.0])]
    zeros = Ragged.from_rows([np.zeros(3)] * 2, np.float64)
    batch = Batch(
        {
            "loss_mask": zeros.like(np.ones(6, np.uint8)),
            "prev_logprobs": Ragged.from_rows(d, np.float64),
            "generation_logprobs": zeros,
        }
    )

    def found(**settings):
        return importance_weights(ImportanceCorrection(**settings), batch, of_states=True)

    assert found(level="token", high=2.0).values.tolist() == pytest.approx([1, 0.5, 2, 1, 1, 1])
    assert found(level="sequence").values.tolist() == pytest.approx([1, 0.5, 2, 1, 1, 1])
    assert found(level="token", truncation="icepop", high=3.0).values.tolist() == pytest.approx([1, 0.5, 0, 1, 1, 1])
    masked = found(level="token", truncation="seq-mask-tis", high=2.0)
    assert masked.values.tolist() == pytest.approx([1, 0.5, 4, 0, 0, 0])


def test_given_responses_have_the_weight_1_and_segments_continue_one_another():
    prompt = make_prompt()
    shown = dataclasses.replace(make_rollout(prompt, 1.0, (7,) * 3), is_demonstration=True)
    group = RolloutGroup.of(prompt, [make_split_rollout(prompt, 0.5, (7, 5), (8, 9)), shown])
    settings = DistillationConfig(on_policy_share=0.5, rewritten_history="split", rollout_program="m.py:P")
    batch = build_batch([group], settings)
    policy = FakeModel()
    correction = ImportanceCorrection(level="sequence")
    found, metrics = with_state_weights(batch, policy, correction=correction, temperature=0.5)
    prev = policy.infer(batch, [LOGPROBS], temperature=0.5).ragged("logprobs")
    d = [(prev[row] + 0.5)[batch.ragged("loss_mask")[row] > 0] for row in (0, 1)]
    products = np.exp(np.cumsum([0.0, *d[0], *d[1]]))
    of_rows = [found.ragged(STATE_WEIGHTS)[row][batch.ragged("loss_mask")[row] > 0] for row in range(3)]
    np.testing.assert_allclose(np.concatenate(of_rows[:2]), products[:4], rtol=1e-5)
    assert of_rows[2].tolist() == [1, 1, 1]
    assert metrics["mismatch/weight"] == pytest.approx(np.exp(np.concatenate(d)).mean(), rel=1e-5)


class Showing(FakeRolloutSource):
    """The first rollout of every group is its row's response."""

    def _rollout(self, prompt, draw, place):
        rollout = super()._rollout(prompt, draw, place)
        return dataclasses.replace(rollout, is_demonstration=True) if place == 0 else rollout


def test_a_step_learns_sampled_and_given_responses_from_the_same_teacher():
    size = len(byte_level(270))
    settings = DistillationConfig(
        num_prompts_per_step=2, num_generations_per_prompt=2, on_policy_share=0.5, max_num_steps=1
    )
    prompts = [make_prompt(f"p{number}") for number in range(4)]
    student, teacher = TorchModel(size, seed=1), TorchModel(size, seed=2, scale=20.0)
    run, source = FakeRun(), Showing(prompts, lambda prompt, tokens: 0.0, num_generations=2)
    correction = ImportanceCorrection(high=2.0, level="token")
    loss = DistillationLoss(Divergence("reverse"), importance=correction)
    steps = RolloutSteps(
        settings, source, FakeWeights(student), Validation([], SamplingParams(max_new_tokens=3), settings), run
    )
    train(
        settings,
        loss,
        policy=student,
        teachers=Teachers({"teacher": teacher}, [topk(5)], temperature=1.0),
        steps=steps,
        rows_per_minibatch=4,
        weights=partial(with_state_weights, correction=correction, temperature=1.0),
    )
    (batch,) = [batch for name, batch in student.calls if name == "train_step"]
    assert batch.array(DEMONSTRATION).tolist() == [1, 0, 1, 0]
    assert (batch.ragged("loss_mask").sums() == 3).all()
    parts = [TorchModel(size, seed=1).evaluate(batch.select([row]), loss)["loss"].result() for row in range(4)]
    assert run.metrics[1]["train/loss"] == pytest.approx(np.mean(parts), rel=1e-5)
    unweighed = [
        TorchModel(size, seed=1).evaluate(batch.select([row]), DistillationLoss(Divergence("reverse")))["loss"].result()
        for row in range(4)
    ]
    assert parts[0] == pytest.approx(unweighed[0], rel=1e-6)
    assert parts[1] != pytest.approx(unweighed[1], rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "key", "says"),
    [
        (OFFLINE, ["loss_fn.importance={}"], "loss_fn.importance", "samples nothing"),
        (
            PLUGIN,
            ["loss_fn.importance={}", "distillation.cross_tokenizer=true"],
            "loss_fn.importance",
            "cross_tokenizer",
        ),
        (
            PLUGIN,
            ["distillation.structured_output=constrain"],
            "distillation.structured_output",
            "distributions over all",
        ),
        (
            PLUGIN,
            ["distillation.on_policy_share=0.5", "distillation.max_rollout_turns=3"],
            "distillation.max_rollout_turns",
            "demonstrations",
        ),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, algorithm, overrides, key, says):
    problem = problems(algorithm, config(tmp_path, algorithm, *overrides))[key]
    assert says in f"{problem.reason} {problem.remedy}"
