"""Estimators, weights and settings of the surrogate that an environment has of its own."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollouts_builder import make_group, make_prompt, make_rollout

from rl_algos.grpo.advantages import drgrpo, grpo, reinforce_plus_plus
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import advantages_of, reads
from rl_algos.grpo.loop import check_environments
from rl_algos.grpo.plugin import grpo_section
from rl_algos.losses.surrogates import SURROGATES
from rl_algos.policy_gradient.loss import objective_of
from rl_algos.policy_gradient.objective import StepData
from rl_algos.policy_gradient.plugin import loss_fn_section, loss_problems
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_algos.torch.policy_loss import compute
from rl_core.config import ProblemError
from rl_core.data.batch import Batch
from rl_core.errors import ConfigError
from rl_core.model_config import GeneratingModelConfig
from rl_core.rollouts.group import RolloutGroup
from rl_core.torch.loss import Rows

POLICY = GeneratingModelConfig(model_name="model", train_global_batch_size=3)


def settings(**written) -> GRPOConfig:
    return grpo_section(written).model_validate(written)


def group(id: str, environment: str, rewards: list[float]) -> RolloutGroup:
    made = make_group(id, rewards)
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, environment=environment))


GROUPS = [
    group("a", "sums", [1.0, 0.0, 0.5]),
    group("b", "code", [3.0, 1.0, 2.0]),
    group("c", "sums", [0.0, 0.0, 1.0]),
    group("d", "chat", [0.0, 0.25, 1.0]),
]


def test_an_environment_has_its_estimator_over_its_own_rollouts_and_its_weight():
    config = settings(
        environments={
            "sums": {"adv_estimator": "reinforce_plus_plus"},
            "code": {"adv_estimator": "drgrpo", "weight": 2.0},
        }
    )
    found = advantages_of(GROUPS, config).reshape(4, 3)
    rewards = {each.prompt.id: each.rewards() for each in GROUPS}
    sums = reinforce_plus_plus(np.concatenate([rewards["a"], rewards["c"]]), np.full(6, 2), None, None)
    np.testing.assert_array_equal(found[[0, 2]].ravel(), sums)
    np.testing.assert_array_equal(found[1], 2.0 * drgrpo(rewards["b"], np.zeros(3)))
    np.testing.assert_array_equal(found[3], grpo(rewards["d"], np.zeros(3)))
    assert reads(config, "penalties")
    assert not reads(settings(), "penalties")


def test_a_weight_alone_leaves_the_rollouts_with_the_others():
    """An estimator over the whole step sees them together."""
    plain = settings(adv_estimator="reinforce_plus_plus")
    weighed = settings(adv_estimator="reinforce_plus_plus", environments={"code": {"weight": 3.0}})
    expected = advantages_of(GROUPS, plain) * np.repeat([1.0, 3.0, 1.0, 1.0], 3)
    np.testing.assert_array_equal(advantages_of(GROUPS, weighed), expected)
    clipped = settings(advantage_clip_high=0.5, environments={"code": {"weight": 3.0}})
    assert advantages_of(GROUPS, clipped).reshape(4, 3).max(1).tolist() == [0.5, 1.5, 0.5, 0.5]


def test_an_estimator_of_an_agent_comes_before_that_of_its_environment():
    config = settings(
        agents={"first": {"adv_estimator": "reinforce", "weight": 2.0}},
        environments={"math": {"adv_estimator": "drgrpo", "weight": 5.0}},
    )
    prompt = make_prompt()
    rollouts = [
        dataclasses.replace(make_rollout(prompt, reward), agent=agent, play=play)
        for play, reward in enumerate((1.0, 0.0))
        for agent in ("first", "second")
    ]
    assert advantages_of([RolloutGroup.of(prompt, rollouts)], config).tolist() == [10.0, 2.5, 0.0, -2.5]


def objective(surrogate, aggregation, environments):
    config = settings(num_prompts_per_step=len(GROUPS), num_generations_per_prompt=3, environments=environments, seed=1)
    loss_fn = {"surrogate": surrogate, "aggregation": aggregation, "force_on_policy_ratio": False, "kl": {"weight": 0}}
    root = SimpleNamespace(grpo=config, loss_fn=loss_fn_section(loss_fn).model_validate(loss_fn), policy=POLICY)
    assert not list(loss_problems(root, config))
    return objective_of(root, config)


def step_batch(groups) -> Batch:
    random = np.random.default_rng(7)
    batch = with_advantages(build_batch(groups, GRPOConfig()), random.normal(size=3 * len(groups)))
    generation = batch.ragged("generation_logprobs")
    prev = generation.like(-random.exponential(1, len(generation.values)) - 0.5)
    return batch.with_columns(
        {
            "generation_logprobs": prev,
            "prev_logprobs": prev,
            "logprobs": prev.like(np.minimum(prev.values + random.normal(0, 0.6, len(prev.values)), -1e-3)),
            "high_covariance": prev.like((random.random(len(prev.values)) < 0.3).astype(np.uint8)),
        }
    )


def gradients(loss, batch: Batch, totals) -> np.ndarray:
    columns = {name: torch.from_numpy(getattr(batch[name], "values", batch[name])) for name in batch}
    logprobs = columns.pop("logprobs").requires_grad_()
    rows = Rows(torch.from_numpy(batch.ragged("tokens").offsets), columns)
    compute(loss, {"logprobs": logprobs}, rows).loss(totals).backward()
    return logprobs.grad.numpy()


CASES = {
    "clip": ({"clip_low": 0.1, "clip_high": 0.5}, {"clip_high": 0.05}),
    "gspo": ({"clip_low": 0.01, "dual_clip": 1.2}, {"clip_high": 0.4}),
    "cispo": ({"clip_high": 0.3}, {"clip_low": 1.0}),
    "sapo": ({"tau_positive": 2.0}, {"tau_negative": 3.0}),
    "gmpo": ({"clip_low": 1.0}, {"clip_high": 0.01}),
    "dppo-tv": ({"threshold": 0.01}, {"threshold": 0.3}),
    "dppo-kl": ({"threshold": 0.001}, {"threshold": 0.3}),
    "clip-cov": ({"clip_high": 3.0}, {"clip_low": 1.0}),
    "kl-cov": ({"weight": 0.1}, {"weight": 3.0}),
    "vespo": ({"k_positive": 1.0}, {"lambda_negative": 0.5}),
    "dro": ({"beta": 0.3}, {"beta": 1.5}),
}


def test_every_surrogate_with_settings_is_a_case():
    assert CASES.keys() == {name for name, kind in SURROGATES.items() if kind().by_row}


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_a_step_are_those_of_a_run_for_each_environment_added_up(name):
    """In float64: the rows of an environment have the gradients that they have in a run with its settings alone."""
    aggregation = SURROGATES[name].aggregations[0]
    of_sums, of_code = CASES[name]
    base = {"name": name} | ({"dual_clip": 1.5} if "dual_clip" in of_sums else {})
    both = objective(base, aggregation, {"sums": {"surrogate": of_sums}, "code": {"surrogate": of_code}})
    data = StepData(1, GROUPS, step_batch(GROUPS))
    batch = both.prepared(data).with_columns({"high_covariance": data.batch["high_covariance"]})
    # a column of settings is float32, as a batch carries it
    batch = batch.with_columns(
        {
            column: np.round(values.astype(np.float64), 6)
            for column, values in batch.columns.items()
            if column.startswith("surrogate_")
        }
    )
    totals = both.loss.totals(batch)
    found = gradients(both.loss, batch, totals)
    environments = np.repeat([each.prompt.environment for each in GROUPS], 3)
    expected = np.zeros_like(found)
    for environment, own in (("sums", of_sums), ("code", of_code), ("chat", {})):
        alone = objective(base | own, aggregation, {})
        rows = np.flatnonzero(environments == environment)
        tokens = np.isin(np.repeat(np.arange(12), batch.lengths), rows)
        expected[tokens] = gradients(alone.loss, data.batch.select(rows), totals)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    unlike = gradients(objective(base, aggregation, {}).loss, data.batch, totals)
    assert not np.allclose(found, unlike)


@pytest.mark.parametrize(
    ("environments", "loss_fn", "key"),
    [
        ({"code": {"surrogate": {"clip_high": -1.0}}}, {}, "grpo.environments.code.surrogate.clip_high"),
        ({"code": {"surrogate": {"dual_clip": 3.0}}}, {}, "grpo.environments.code.surrogate"),
        ({"code": {"surrogate": {"share": 0.1}}}, {"surrogate": "kl-cov"}, "grpo.environments.code.surrogate"),
        ({"code": {"surrogate": {"beta": 0.1}}}, {"surrogate": "reinforce"}, "grpo.environments.code.surrogate"),
    ],
)
def test_settings_that_cannot_differ_by_environment_are_refused(environments, loss_fn, key):
    config = settings(num_prompts_per_step=4, num_generations_per_prompt=2, environments=environments)
    root = SimpleNamespace(grpo=config, loss_fn=loss_fn_section(loss_fn).model_validate(loss_fn), policy=POLICY)
    assert [problem.key for problem in loss_problems(root, config)] == [key]


def test_a_name_that_no_row_has_and_one_that_is_no_name_are_refused():
    dataset = SimpleNamespace(source=None, environments=lambda: {"sums": "a:train:0", "code": "a:train:7"})
    loaded = SimpleNamespace(train=[dataset])
    check_environments(settings(environments={"code": {"weight": 2.0}}), loaded)
    with pytest.raises(ConfigError, match=r"grpo\.environments\.coed: .*; their environments are code, sums"):
        check_environments(settings(environments={"coed": {"weight": 2.0}}), loaded)
    with pytest.raises(ProblemError) as refused:
        grpo_section({"environments": {"score.py:score": {"weight": 2.0}}})
    [problem] = refused.value.problems
    assert (problem.key, problem.got) == ("environments", "score.py:score")
    assert "`env`" in problem.remedy
