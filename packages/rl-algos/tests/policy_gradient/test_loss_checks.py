"""Which settings of the policy loss go together, and what is said of those that do not."""

import math
from types import SimpleNamespace

import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.grpo.config import GRPOConfig
from rl_algos.losses.surrogates import SURROGATES
from rl_algos.losses.terms import Demonstrations
from rl_algos.policy_gradient.config import LossConfig
from rl_algos.policy_gradient.loss import objective_of, policy_loss_of
from rl_algos.policy_gradient.plugin import loss_fn_section, loss_problems, policy_loss_problems
from rl_algos.rollouts.config import AsyncConfig
from rl_core.config import ProblemError, assemble, load, resolve
from rl_core.errors import ConfigProblems
from rl_core.model_config import BackendConfig, EngineConfig, GeneratingModelConfig, GenerationConfig

POLICY = GeneratingModelConfig(model_name="model", train_global_batch_size=8)

TIS = {"importance": {}}
GSPO = {"surrogate": "gspo", "aggregation": "sequence-mean"}


def configured(written) -> LossConfig:
    section = loss_fn_section(written).model_validate(written)
    assert isinstance(section, LossConfig)
    return section


def problems(written):
    """Problems of what a section refuses, or else of what does not go together."""
    kind = assemble("Root", {"loss_fn": loss_fn_section(written)})
    raw = load({"loss_fn": written})
    try:
        resolve(raw, kind, checks=[lambda config: policy_loss_problems(config.loss_fn)])
    except ConfigProblems as error:
        return [problem.at(problem.key.removeprefix("loss_fn.")) for problem in error.problems]
    return []


REFUSED = [
    # GSPO has one ratio per sequence
    (
        {"surrogate": "gspo"},
        "aggregation.name",
        {"got": "token-mean", "allowed": "sequence-mean, sequence-mean-token-sum", MENTIONS: ["gspo"]},
    ),
    ({"surrogate": "gspo", "aggregation": "token-sum"}, "aggregation.name", {"got": "token-sum"}),
    (GSPO | {"importance": {"level": "token"}}, "importance.level", {"got": "token", "allowed": "sequence"}),
    (
        GSPO | {"importance": {"truncation": "seq-mask-tis", "high": 2.0}},
        "importance.truncation",
        {"got": "seq-mask-tis", "allowed": "tis, icepop"},
    ),
    # CISPO
    (
        {"surrogate": "cispo", "force_on_policy_ratio": True},
        "force_on_policy_ratio",
        {"got": True, MENTIONS: ["cispo", "loss_fn.surrogate=reinforce"]},
    ),
    (
        {"surrogate": "cispo", "aggregation": "sequence-mean"},
        "aggregation.name",
        {"got": "sequence-mean", MENTIONS: ["cispo"]},
    ),
    ({"surrogate": {"name": "cispo", "dual_clip": 3.0}}, "surrogate.dual_clip", {MENTIONS: ["no such key"]}),
    ({"surrogate": {"name": "sapo", "clip_high": 0.28}}, "surrogate.clip_high", {MENTIONS: ["no such key"]}),
    ({"surrogate": {"name": "dppo-tv", "threshold": 0.0}}, "surrogate.threshold", {"got": 0.0, "allowed": "float > 0"}),
    ({"surrogate": {"name": "clip-cov", "low": 6.0}}, "surrogate.low", {"got": 6.0, MENTIONS: ["high (5.0)"]}),
    ({"surrogate": "kl-cov", "force_on_policy_ratio": True}, "force_on_policy_ratio", {MENTIONS: ["kl-cov"]}),
    (
        {"surrogate": "gmpo", "aggregation": "sequence-mean", "filters": {"top_entropy_share": 0.2}},
        "filters.top_entropy_share",
        {"got": 0.2, MENTIONS: ["gmpo"]},
    ),
    # aggregation
    ({"aggregation": {"divisor": 512.0}}, "aggregation.divisor", {"is_unused": True, MENTIONS: ["token-mean"]}),
    # KL
    ({"kl": {"estimator": "k1"}}, "kl.estimator", {"got": "k1", MENTIONS: ["unbiased=true", "in_reward=true", "k3"]}),
    ({"kl": {"estimator": "k2", "unbiased": True}}, "kl.unbiased", {"is_unused": False, MENTIONS: ["k2", "k3"]}),
    (
        {"entropy_bonus": {"weight": 0.1, "measured": True}},
        "entropy_bonus.measured",
        {"is_unused": True, MENTIONS: ["with a bonus"]},
    ),
    ({"kl": {"weight": 0.1, "measured": True}}, "kl.measured", {"is_unused": True, MENTIONS: ["weight above 0"]}),
    ({"kl": {"weight": 0.0, "in_reward": True}}, "kl.in_reward", {"is_unused": True, MENTIONS: ["weight=0"]}),
    ({"kl": {"in_reward": True, "unbiased": True}}, "kl.unbiased", {"is_unused": True, MENTIONS: ["in_reward=true"]}),
    ({"kl": {"weight": 0.0, "target": 0.1}}, "kl.target", {"got": 0.1, MENTIONS: ["weight"]}),
    # the denominator of the ratio
    (
        {"ratio_denominator": "generation", "surrogate": "reinforce"},
        "ratio_denominator",
        {"is_unused": True, MENTIONS: ["reinforce"]},
    ),
    (TIS | {"ratio_denominator": "generation"}, "importance", {MENTIONS: ["ratio_denominator=generation"]}),
    (
        {"ratio_denominator": "generation", "force_on_policy_ratio": True},
        "force_on_policy_ratio",
        {"got": True, MENTIONS: ["ratio_denominator=generation"]},
    ),
    # importance correction
    ({"importance": {"low": 3.0, "high": 2.0}}, "importance.low", {"got": 3.0, MENTIONS: ["high (2.0)"]}),
    ({"importance": {"truncation": "icepop"}}, "importance.high", {MENTIONS: ["icepop"]}),
    (
        {"importance": {"batch_normalize": True}, "aggregation": "token-sum"},
        "importance.batch_normalize",
        {"is_unused": True, MENTIONS: ["token-sum"]},
    ),
    (
        {"importance": {"batch_normalize": True}, "force_on_policy_ratio": True},
        "force_on_policy_ratio",
        {"got": True, MENTIONS: ["importance.batch_normalize"]},
    ),
    ({"importance": {"rejection": {}}}, "importance.rejection.high", {"is_unused": False, MENTIONS: ["must be set"]}),
    (
        {"importance": {"rejection": {"estimator": "k3", "low": 0.1}}},
        "importance.rejection.low",
        {"got": 0.1, MENTIONS: ["k1", "k3"]},
    ),
    (
        {"importance": {"rejection": {"estimator": "k1", "low": 0.2, "high": 0.1}}},
        "importance.rejection.low",
        {"got": 0.2, MENTIONS: ["high (0.1)"]},
    ),
    # staleness
    ({"staleness": {"decay": 1.0}}, "staleness.decay", {"got": 1.0, "allowed": "float > 0 and < 1"}),
]


@pytest.mark.parametrize(
    ("written", "key", "fields"), REFUSED, ids=[f"{key}-{i}" for i, (_, key, _) in enumerate(REFUSED)]
)
def test_what_contradicts_itself_or_has_no_effect_is_refused_with_the_reason(written, key, fields):
    (problem,) = problems(written)
    assert_fields(problem, key, fields)


ACCEPTED = [
    {},
    GSPO,
    {"surrogate": "gspo", "aggregation": "sequence-mean-token-sum"},
    {"surrogate": {"name": "cispo", "clip_low": 1.0, "clip_high": 3.0}},
    {"surrogate": "reinforce"},
    {"ratio_denominator": "generation"},
    GSPO | {"ratio_denominator": "generation"},
    {"aggregation": {"name": "sequence-mean-token-sum", "divisor": 512.0}},
    {"kl": {"estimator": "k1", "unbiased": True}},
    {"kl": {"estimator": "k1", "in_reward": True, "target": 0.05}},
    {"importance": {"low": 0.5, "high": 2.0}},
    GSPO | {"importance": {"truncation": "icepop", "high": 2.0}},
    {"importance": {"rejection": {"statistic": "max", "estimator": "k2", "high": 2.0}}},
    {"surrogate": {"name": "clip-cov", "share": 0.01}, "filters": {"off_policy_threshold": 0.5}},
    {"filters": {"top_entropy_share": 0.2}, "kl": {"weight": 0.0}},
    {"entropy_bonus": {"weight": 0.01}, "positive_example_nll_weight": 0.1},
]


@pytest.mark.parametrize("written", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_goes_together_is_a_loss(written):
    section = configured(written)
    assert problems(written) == []
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2), loss_fn=section, policy=POLICY
    )
    loss = policy_loss_of(config, config.grpo)
    # the config holds the objects that the loss is made of
    assert loss.surrogate is section.surrogate
    assert loss.filters is section.filters
    assert loss.kl is (section.kl if section.kl.is_in_loss else None)


@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate_is_chosen_by_its_name_with_its_settings(name):
    aggregation = SURROGATES[name].aggregations[0]
    written = {"surrogate": {"name": name}, "aggregation": aggregation}
    assert problems(written) == []
    assert type(configured(written).surrogate) is SURROGATES[name]


def test_a_setting_of_another_surrogate_and_an_unknown_one_are_refused():
    with pytest.raises(ValueError, match="tau_positive"):
        configured({"surrogate": {"name": "clip", "tau_positive": 1.0}})
    with pytest.raises(ProblemError) as refused:
        configured({"surrogate": "sappo"})
    (problem,) = refused.value.problems
    fields = {"got": "sappo", "allowed": ", ".join(SURROGATES), "remedy": "Did you mean sapo?"}
    assert_fields(problem, "surrogate.name", fields)


def ahead(loss_fn):
    """Problems of a loss of rollouts that may be two steps old."""
    config = SimpleNamespace(
        grpo=GRPOConfig(
            num_prompts_per_step=4,
            num_generations_per_prompt=2,
            async_grpo=AsyncConfig(enabled=True, max_trajectory_age_steps=2),
        ),
        loss_fn=loss_fn,
        policy=POLICY,
    )
    return list(loss_problems(config, config.grpo))


@pytest.mark.parametrize("written", [TIS, {"ratio_denominator": "generation"}])
def test_a_loss_that_corrects_takes_older_rollouts(written):
    assert ahead(configured(written)) == []


def test_weights_by_age_need_rollouts_that_run_ahead():
    decaying = configured({**TIS, "staleness": {"decay": 0.9}})
    assert ahead(decaying) == []
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2), loss_fn=decaying, policy=POLICY
    )
    (problem,) = loss_problems(config, config.grpo)
    assert_fields(problem, "loss_fn.staleness", {"is_unused": True, MENTIONS: ["grpo.async_grpo.enabled=true"]})


def test_a_loss_that_does_not_correct_is_refused_for_older_rollouts():
    (problem,) = ahead(configured({}))
    mentions = ["grpo.async_grpo", "2 steps", "loss_fn.importance.high=2", "loss_fn.ratio_denominator=generation"]
    assert_fields(problem, "loss_fn.importance", {"is_unused": False, MENTIONS: mentions})


class Quantising(EngineConfig):
    @property
    def reduced_precision(self):
        return "vllm_cfg.quantization.method=fp8"


class In8Bits(BackendConfig):
    @property
    def reduced_precision(self):
        return "dtensor_cfg.float8.recipe=rowwise"


class PolicyIn8Bits(GeneratingModelConfig):
    dtensor_cfg: BackendConfig = BackendConfig()


class QuantisedGeneration(GenerationConfig):
    vllm_cfg: Quantising = Quantising()


REDUCED = {
    "rollouts": PolicyIn8Bits(model_name="model", train_global_batch_size=8, generation=QuantisedGeneration()),
    "training": PolicyIn8Bits(model_name="model", train_global_batch_size=8, dtensor_cfg=In8Bits()),
}
KEYS = {
    "rollouts": "policy.generation.vllm_cfg.quantization.method=fp8",
    "training": "policy.dtensor_cfg.float8.recipe=rowwise",
}


def in_fewer_bits(policy, loss_fn):
    """Problems of a loss if a part of the policy computes in fewer bits."""
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2), loss_fn=loss_fn, policy=policy
    )
    return list(loss_problems(config, config.grpo))


@pytest.mark.parametrize("part", REDUCED)
def test_a_loss_that_does_not_correct_is_refused_if_a_part_computes_in_fewer_bits(part):
    (problem,) = in_fewer_bits(REDUCED[part], configured({}))
    mentions = [KEYS[part], "loss_fn.importance.high=2", "loss_fn.allow_uncorrected_precision=true"]
    assert_fields(problem, "loss_fn.importance", {"is_unused": False, MENTIONS: mentions})


@pytest.mark.parametrize("part", REDUCED)
@pytest.mark.parametrize("written", [TIS, {"ratio_denominator": "generation"}, {"allow_uncorrected_precision": True}])
def test_a_loss_that_corrects_or_is_told_not_to_takes_fewer_bits(part, written):
    assert in_fewer_bits(REDUCED[part], configured(written)) == []


def test_a_backend_that_is_not_chosen_does_not_count():
    class TwoBackends(PolicyIn8Bits):
        megatron_cfg: BackendConfig = BackendConfig()

    policy = TwoBackends(
        model_name="model", train_global_batch_size=8, dtensor_cfg=In8Bits(), megatron_cfg=BackendConfig(enabled=True)
    )
    assert in_fewer_bits(policy, configured({})) == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_loss_of_ones_own_takes_fewer_bits_if_it_reads_the_logprobs_of_the_engine(tmp_path, reads):
    columns = ("loss_mask", "advantages", *(["generation_logprobs"] if reads else []))
    (tmp_path / "mine.py").write_text(LOSS_CLASS.format(columns=columns))
    written = {"name": f"{tmp_path}/mine.py:Mine"}
    found = in_fewer_bits(REDUCED["rollouts"], loss_fn_section(written).model_validate(written))
    assert [problem.key for problem in found] == ([] if reads else ["loss_fn.name"])


@pytest.mark.parametrize("reads", [True, False])
def test_a_loss_of_ones_own_takes_older_rollouts_if_it_reads_their_logprobs(tmp_path, reads):
    columns = ("loss_mask", "advantages", *(["generation_logprobs"] if reads else []))
    (tmp_path / "mine.py").write_text(LOSS_CLASS.format(columns=columns))
    written = {"name": f"{tmp_path}/mine.py:Mine"}
    found = ahead(loss_fn_section(written).model_validate(written))
    assert [problem.key for problem in found] == ([] if reads else ["loss_fn.name"])


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("policy", ["split", "keep"])
def test_a_loss_of_ones_own_takes_segments_if_it_reads_what_they_are_part_of(tmp_path, reads, policy):
    (tmp_path / "mine.py").write_text(LOSS_CLASS.format(columns=("loss_mask", *(["pair"] if reads else []))))
    written = {"name": f"{tmp_path}/mine.py:Mine"}
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2, rewritten_history=policy),
        loss_fn=loss_fn_section(written).model_validate(written),
        policy=POLICY,
    )
    found = [problem.key for problem in loss_problems(config, config.grpo)]
    expected = {("split", False): ["grpo.rewritten_history"], ("keep", True): ["loss_fn.name"]}
    assert found == expected.get((policy, reads), [])
    assert ("pair" in objective_of(config, config.grpo).columns) == (policy == "keep" and reads)


LOSS_CLASS = """
from dataclasses import dataclass
from rl_core.model import LOGPROBS

@dataclass(frozen=True)
class Mine:
    temperature: float = 1.0
    columns = {columns}
    reads = (LOGPROBS,)
    implementation = "mine:compute"

    def totals(self, batch):
        return {{"tokens": 1.0}}
"""


@pytest.mark.parametrize(
    ("turns", "generation", "expected"),
    [
        (2, {}, []),
        (1, {}, ["loss_fn.observation_nll_weight"]),
        (2, {"top_p": 0.9}, ["policy.generation.top_p"]),
        (2, {"thinking_budget": 4}, ["loss_fn.observation_nll_weight"]),
        (2, {"thinking_budget": 4, "thinking_budget_mode": "truncate"}, []),
    ],
)
def test_observations_are_learned_between_turns_and_over_all_tokens(turns, generation, expected):
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2, max_rollout_turns=turns),
        loss_fn=configured({"observation_nll_weight": 0.1}),
        policy=POLICY.model_copy(update={"generation": GenerationConfig(**generation)}),
    )
    assert [problem.key for problem in loss_problems(config, config.grpo)] == expected


SHARE, OWN = {"share": 0.25}, {"dataset": {"data_path": "rows.jsonl"}, "rows_per_step": 4}


@pytest.mark.parametrize(
    ("shown", "loss_fn", "generation", "expected"),
    [
        (SHARE, {"demonstrations": "shaped"}, {}, []),
        (SHARE, {"demonstrations": {"name": "nll", "by_probability": True}}, {}, []),
        (OWN, {"demonstrations": "nll"}, {}, []),
        (OWN | SHARE, {"demonstrations": "nll"}, {}, []),
        (OWN, {"demonstrations": "shaped"}, {}, ["loss_fn.demonstrations.name"]),
        (SHARE, {}, {}, ["loss_fn.demonstrations"]),
        ({}, {"demonstrations": "nll"}, {}, ["loss_fn.demonstrations"]),
        (OWN, {"demonstrations": "nll"}, {"top_p": 0.9}, ["policy.generation.top_p"]),
        (
            SHARE,
            {"demonstrations": "shaped", "importance": {"batch_normalize": True}},
            {},
            ["loss_fn.importance.batch_normalize"],
        ),
    ],
)
def test_demonstrations_need_a_loss_that_learns_them_and_tokens_that_any_policy_has(
    shown, loss_fn, generation, expected
):
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2, demonstrations=shown),
        loss_fn=configured(loss_fn),
        policy=POLICY.model_copy(update={"generation": GenerationConfig(**generation)}),
    )
    assert [problem.key for problem in loss_problems(config, config.grpo)] == expected


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"name": "shaped", "weight": 0.5}, "demonstrations.weight"),
        ({"gamma": 0.5}, "demonstrations.gamma"),
        ({"final_weight": 0.5}, "demonstrations.final_weight"),
    ],
)
def test_settings_of_the_other_term_of_demonstrations_are_refused(written, key):
    assert [problem.key for problem in problems({"demonstrations": written})] == [key]


def test_the_weight_of_demonstrations_follows_its_schedule():
    """The schedule of CHORD's authors: a linear warmup, then a cosine."""
    term = Demonstrations(weight=0.9, warmup_steps=3, decay_steps=4, final_weight=0.1)
    expected = [0, 0.3, 0.6, 0.9, *(0.1 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)), 0.1]
    assert [term.at_step(step).weight for step in range(1, 10)] == pytest.approx(expected)
    assert [Demonstrations(weight=0.2).at_step(step).weight for step in (1, 100)] == [0.2, 0.2]
