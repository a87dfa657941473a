"""What a config's sections become."""

from types import SimpleNamespace

import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import estimator_section
from rl_algos.grpo.plugin import check, grpo_section, models
from rl_algos.losses.surrogates import Reinforce
from rl_algos.policy_gradient.config import LossConfig
from rl_algos.policy_gradient.loss import columns_of, loss_section, objective_of, policy_loss_of
from rl_algos.rollouts.config import RewardShapingConfig
from rl_core.model_config import GenerationConfig
from rl_core.token_filter import TokenFilter


def make_config(minibatch, **loss):
    return SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2),
        loss_fn=LossConfig(**loss),
        policy=SimpleNamespace(train_global_batch_size=minibatch, generation=GenerationConfig(temperature=0.7)),
    )


@pytest.mark.parametrize(("minibatch", "forced", "on_policy"), [(8, None, True), (4, None, False), (8, False, False)])
def test_one_minibatch_a_step_needs_no_logprobs_from_before_it_unless_they_are_asked_for(minibatch, forced, on_policy):
    config = make_config(minibatch, force_on_policy_ratio=forced)
    loss = policy_loss_of(config, config.grpo)
    assert loss.on_policy is on_policy
    assert ("prev_logprobs" in loss.columns) is not on_policy


def test_the_loss_divides_by_the_temperature_that_rollouts_are_sampled_at():
    config = make_config(8)
    assert policy_loss_of(config, config.grpo).temperature == 0.7


LOSS = """
from dataclasses import dataclass
from rl_core.model import LOGPROBS, Read

@dataclass(frozen=True)
class Loss:
    temperature: float
    beta: float = 0.5
    implementation: str = "mine.py:compute"
    columns = ("loss_mask", "advantages", COLUMN)
    reads = (LOGPROBS,)

    def __post_init__(self):
        if self.beta < 0:
            raise ValueError(f"beta must not be negative, got {self.beta}")

    def totals(self, batch):
        return {"tokens": 1.0}

@dataclass(frozen=True)
class Filtered:
    token_filter: object
    temperature: float
    implementation: str = "mine.py:compute"
    columns = ("loss_mask",)
    totals = None

    @property
    def reads(self):
        return (Read("logprobs", token_filter=self.token_filter),)

@dataclass(frozen=True)
class Fixed:
    columns = ("loss_mask",)
    reads = (LOGPROBS,)
    temperature = 1.0
    implementation = "mine.py:compute"
    totals = None

@dataclass(frozen=True)
class Half:
    columns = ()

class Plain:
    pass
"""


@pytest.fixture
def custom(tmp_path):
    def make(column="generation_logprobs", kind="Loss", **settings):
        path = tmp_path / "mine.py"
        path.write_text(LOSS.replace("COLUMN", repr(column)))
        config = make_config(8)
        name = f"{path}:{kind}"
        config.loss_fn = loss_section(name)(name=name, **settings)
        return config

    return make


def problems(config, **sampling):
    config.policy.max_total_sequence_length = 64
    config.policy.generation = GenerationConfig(backend="none", temperature=0.7, max_new_tokens=8, **sampling)
    config.data = DataConfig(train=DatasetConfig(dataset_name="arithmetic"))
    return list(check(config))


def test_a_class_of_a_file_is_the_loss_with_its_settings_and_the_temperature_of_sampling(custom):
    config = custom(beta=0.25)
    loss = policy_loss_of(config, config.grpo)
    assert (loss.beta, loss.temperature, loss.implementation) == (0.25, 0.7, "mine.py:compute")
    assert problems(custom(beta=0.25)) == []


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.05}])
def test_a_loss_reads_the_tokens_that_training_samples_from(custom, sampling):
    expected = TokenFilter(**sampling) if sampling else None
    for config in (make_config(8), custom(kind="Filtered")):
        assert problems(config, **sampling) == []
        assert policy_loss_of(config, config.grpo).reads[0].token_filter == expected
    found = problems(custom(), **sampling)
    assert [problem.key for problem in found] == [f"policy.generation.{key}" for key in sampling]
    assert [problem.got for problem in found] == list(sampling.values())
    assert all("`token_filter`" in problem.remedy for problem in found)


def test_a_loss_reads_the_tokens_that_grammars_allow(custom):
    def constrained(config):
        config.grpo = config.grpo.model_copy(update={"structured_output": "constrain"})
        return config

    for config in (constrained(make_config(8)), constrained(custom(kind="Filtered"))):
        assert problems(config, top_k=9) == []
        assert policy_loss_of(config, config.grpo).reads[0].token_filter == TokenFilter(top_k=9, allowed=True)
    (problem,) = problems(constrained(custom()))
    assert (problem.key, problem.got) == ("grpo.structured_output", "constrain")
    assert "`token_filter`" in problem.remedy


def test_what_the_parts_read_before_the_update_is_read():
    config = make_config(8, filters={"top_entropy_share": 0.2}, kl={"weight": 0.0})
    objective = objective_of(config, config.grpo, read_before=("prev_collision",))
    assert objective.loss.filters.top_entropy_share == 0.2
    assert objective.columns >= {"prev_entropy", "prev_collision"}
    assert "high_entropy" not in objective.columns


@pytest.mark.parametrize(("column", "keeps"), [("ref_logprobs", True), ("prev_logprobs", False)])
def test_a_policy_keeps_its_reference_if_the_loss_reads_it(custom, column, keeps):
    assert models(custom(column))["policy"].spec.keeps_reference is keeps


def test_what_does_not_go_with_a_loss_is_found_before_anything_starts(custom):
    (problem,) = problems(custom("values"))
    assert_fields(problem, "loss_fn.name", {MENTIONS: ["values"]})
    assert all(column in problem.allowed for column in ("loss_mask", "advantages"))
    (problem,) = problems(custom(beta=-1.0))
    assert problem.key == "loss_fn"
    assert problem.reason.endswith("beta must not be negative, got -1.0")
    config = custom(beta=-1.0)
    assert columns_of(config, config.grpo) == frozenset()
    (problem,) = problems(custom(kind="Fixed"))
    assert_fields(problem, "policy.generation.temperature", {"got": 0.7, MENTIONS: ["`temperature`"]})


@pytest.mark.parametrize(
    ("estimator", "grpo", "loss", "key", "mentions"),
    [
        ({"name": "grpo"}, {"batch_multiplier": 2.0}, {}, "grpo.batch_multiplier", "use_dynamic_sampling=true"),
        ({"name": "drgrpo"}, {"normalize_rewards": False}, {}, "grpo.normalize_rewards", "drgrpo"),
        ({"name": "maxrl"}, {}, {"kl": {"in_reward": True}}, "loss_fn.kl.in_reward", "maxrl"),
        (
            {"name": "gdpo"},
            {"reward_shaping": RewardShapingConfig(enabled=True)},
            {},
            "grpo.reward_shaping.enabled",
            "gdpo",
        ),
    ],
)
def test_what_an_estimator_does_not_read_is_refused(estimator, grpo, loss, key, mentions):
    config = make_config(8, **loss)
    section = estimator_section(estimator["name"])(**estimator)
    config.grpo = config.grpo.model_copy(update={"adv_estimator": section, **grpo})
    (problem,) = problems(config)
    assert_fields(problem, key, {"is_unused": True, MENTIONS: [mentions]})


def test_k_is_at_most_the_number_of_rollouts_of_a_prompt():
    config = make_config(8)
    section = estimator_section("pass_at_k")(name="pass_at_k", k=3)
    config.grpo = config.grpo.model_copy(update={"adv_estimator": section})
    (problem,) = problems(config)
    allowed = "int from 1 to grpo.num_generations_per_prompt (2)"
    assert_fields(problem, "grpo.adv_estimator.k", {"got": 3, "allowed": allowed})
    written = {"environments": {"sums": {"adv_estimator": {"name": "pass_at_k", "k": 3}}}}
    environments = grpo_section(written).model_validate(written).environments
    config.grpo = make_config(8).grpo.model_copy(update={"environments": environments})
    (problem,) = problems(config)
    assert_fields(problem, "grpo.environments.sums.adv_estimator.k", {"got": 3, "allowed": allowed})


def test_several_passes_read_the_policy_before_the_first_and_need_a_ratio():
    def with_passes(count, **loss):
        config = make_config(8, **loss)
        config.grpo = config.grpo.model_copy(update={"num_iterations": count})
        return config

    once, twice = with_passes(1), with_passes(2)
    assert problems(twice) == []
    assert "prev_logprobs" not in objective_of(once, once.grpo).columns
    assert "prev_logprobs" in objective_of(twice, twice.grpo).columns
    (problem,) = problems(with_passes(2, surrogate=Reinforce()))
    assert_fields(problem, "grpo.num_iterations", {"got": 2, MENTIONS: ["reinforce", "loss_fn.surrogate"]})
    (problem,) = problems(with_passes(2, force_on_policy_ratio=True))
    assert_fields(problem, "loss_fn.force_on_policy_ratio", {"got": True, "remedy": "Remove this key"})


@pytest.mark.parametrize(
    ("grpo", "loss", "key", "mentions"),
    [
        ({"reference_sync_period": 4}, {"kl": {"weight": 0.0}}, "reference_sync_period", "loss_fn.kl.weight"),
        ({"reference_mixup_alpha": 0.6}, {}, "reference_mixup_alpha", "grpo.reference_sync_period=0"),
    ],
)
def test_a_reference_that_could_not_move_or_that_nothing_reads_is_refused(grpo, loss, key, mentions):
    config = make_config(8, **loss)
    config.grpo = config.grpo.model_copy(update=grpo)
    (problem,) = problems(config)
    assert_fields(problem, f"grpo.{key}", {"is_unused": True, MENTIONS: [mentions]})


def test_a_reference_may_follow_the_policy():
    config = make_config(8, kl={"weight": 0.1})
    config.grpo = config.grpo.model_copy(update={"reference_sync_period": 4, "reference_mixup_alpha": 0.6})
    assert problems(config) == []


@pytest.mark.parametrize(
    ("kind", "says"), [("Half", "Half .*reads, temperature, implementation, totals"), ("Plain", "Plain .*dataclass")]
)
def test_what_cannot_be_a_loss_is_refused(custom, kind, says):
    with pytest.raises(ValueError, match=says):
        custom(kind=kind)
    with pytest.raises(ValueError, match=r'got "polcy"; allowed: policy, or .*package\.module:Class or file\.py:Class'):
        loss_section("polcy")
