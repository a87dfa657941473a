"""Which settings of the policy loss go together, and what is said of those that do not."""

import re
from types import SimpleNamespace

import pytest

from rl_algos.grpo.config import GRPOConfig
from rl_algos.losses.surrogates import SURROGATES
from rl_algos.policy_gradient.loss import loss_of, objective_of
from rl_algos.policy_gradient.loss_checks import loss_problems, policy_loss_problems
from rl_algos.policy_gradient.loss_config import LossConfig
from rl_algos.policy_gradient.plugin import loss_fn_section
from rl_algos.rollouts.config import AsyncConfig
from rl_core.config import ProblemError
from rl_core.model_config import GenerationConfig

TIS = {"use_importance_sampling_correction": True}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}


def configured(written) -> LossConfig:
    section = loss_fn_section(written).model_validate(written)
    assert isinstance(section, LossConfig)
    return section


def problems(written):
    return [(problem.key.removeprefix("loss_fn."), problem.message) for problem in policy_loss_problems(written)]


REFUSED = [
    # GSPO has one ratio per sequence
    ({"sequence_level_importance_ratios": True}, "token_level_loss", "gspo does not go with .* token-mean"),
    ({"surrogate": "gspo", "aggregation": "token-mean"}, "aggregation", "set aggregation to sequence-mean or"),
    (GSPO | TIS | {"importance_sampling_level": "token"}, "importance_sampling_level", "one ratio per sequence"),
    (
        GSPO | TIS | {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 2.0},
        "truncated_importance_sampling_type",
        "use tis or icepop",
    ),
    # one surrogate
    (GSPO | {"use_cispo": True}, "use_cispo", "not gspo and cispo"),
    ({"use_cispo": True, "surrogate": "clip"}, "use_cispo", "but surrogate.name is clip"),
    # CISPO
    ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio", "use surrogate=reinforce"),
    ({"use_cispo": True, "token_level_loss": False}, "token_level_loss", "cispo does not go with"),
    ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c", "has no effect with the surrogate cispo"),
    ({"surrogate": "sapo", "ratio_clip_max": 0.28}, "ratio_clip_max", "set it to 0.2"),
    ({"surrogate": {"name": "dppo-tv", "threshold": 0.0}}, "surrogate", "threshold must be above 0, got 0.0"),
    ({"surrogate": "kl-cov", "force_on_policy_ratio": True}, "force_on_policy_ratio", "which kl-cov needs"),
    (
        {"surrogate": "gmpo", "aggregation": "sequence-mean", "top_entropy_share": 0.2},
        "top_entropy_share",
        "belongs to its whole sequence",
    ),
    # aggregation
    ({"aggregation": "token-sum", "token_level_loss": False}, "token_level_loss", "set one of them only"),
    ({"aggregation_divisor": 512.0}, "aggregation_divisor", "no effect with the aggregation token-mean"),
    # KL
    ({"reference_policy_kl_type": "k1"}, "reference_policy_kl_type", "no gradient in expectation"),
    (
        {"reference_policy_kl_type": "k2", "reference_policy_kl_unbiased": True},
        "reference_policy_kl_unbiased",
        "exact gradient by itself",
    ),
    (
        {"reference_policy_kl_penalty": 0.0, "use_kl_in_reward": True},
        "use_kl_in_reward",
        "no effect with reference_policy_kl_penalty=0",
    ),
    (
        {"use_kl_in_reward": True, "reference_policy_kl_unbiased": True},
        "reference_policy_kl_unbiased",
        "KL in the reward does not have",
    ),
    (
        {"reference_policy_kl_penalty": 0.0, "adaptive_kl": {"target": 0.1}},
        "adaptive_kl.target",
        "set reference_policy_kl_penalty above 0",
    ),
    # the denominator of the ratio
    ({"ratio_denominator": "generation", "disable_ppo_ratio": True}, "ratio_denominator", "which has no ratio"),
    (TIS | {"ratio_denominator": "generation"}, "use_importance_sampling_correction", "set one of them only"),
    (
        {"ratio_denominator": "generation", "force_on_policy_ratio": True},
        "force_on_policy_ratio",
        "which it is not to generation",
    ),
    # importance correction
    ({"truncated_importance_sampling_type": "icepop"}, "truncated_importance_sampling_type", "has no effect without"),
    ({"truncated_importance_sampling_ratio_min": 0.5}, "truncated_importance_sampling_ratio_min", "without use_imp"),
    ({"importance_sampling_rejection": {"high": 1.0}}, "importance_sampling_rejection", "has no effect without"),
    (
        TIS | {"truncated_importance_sampling_ratio_min": 3.0, "truncated_importance_sampling_ratio": 2.0},
        "truncated_importance_sampling_ratio_min",
        "no weight would be left",
    ),
    (
        TIS | {"truncated_importance_sampling_type": "icepop"},
        "truncated_importance_sampling_ratio",
        "needs an upper bound",
    ),
    (
        TIS | {"importance_sampling_batch_normalize": True, "aggregation": "token-sum"},
        "importance_sampling_batch_normalize",
        "nothing to divide by",
    ),
    (
        TIS | {"importance_sampling_batch_normalize": True, "force_on_policy_ratio": True},
        "force_on_policy_ratio",
        "which importance_sampling_batch_normalize needs",
    ),
    (
        TIS | {"importance_sampling_rejection": {"estimator": "k3", "low": 0.1}},
        "importance_sampling_rejection.low",
        "never negative",
    ),
    (
        TIS | {"importance_sampling_rejection": {"estimator": "k1", "low": 0.2, "high": 0.1}},
        "importance_sampling_rejection.low",
        "above high",
    ),
]


@pytest.mark.parametrize(
    ("written", "key", "says"), REFUSED, ids=[f"{key}-{i}" for i, (_, key, _) in enumerate(REFUSED)]
)
def test_what_contradicts_itself_or_has_no_effect_is_refused_with_the_reason(written, key, says):
    ((found, message),) = problems(configured(written))
    assert found == key
    assert re.search(says, message), message


ACCEPTED = [
    {},
    GSPO,
    {"surrogate": "gspo", "aggregation": "sequence-mean-token-sum"},
    {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 3.0},
    {"disable_ppo_ratio": True},
    {"ratio_denominator": "generation"},
    GSPO | {"ratio_denominator": "generation"},
    {"aggregation": "sequence-mean-token-sum", "aggregation_divisor": 512.0},
    {"reference_policy_kl_type": "k1", "reference_policy_kl_unbiased": True},
    {"reference_policy_kl_type": "k1", "use_kl_in_reward": True, "adaptive_kl": {"target": 0.05}},
    TIS | {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5},
    TIS | GSPO | {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
    TIS | {"importance_sampling_rejection": {"statistic": "max", "estimator": "k2", "high": 2.0}},
    {"surrogate": {"name": "clip-cov", "share": 0.01}, "off_policy_sequence_mask_threshold": 0.5},
    {"top_entropy_share": 0.2, "reference_policy_kl_penalty": 0.0},
    {"entropy_bonus": {"weight": 0.01}, "positive_example_nll_weight": 0.1},
]


@pytest.mark.parametrize("written", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_goes_together_is_a_loss(written):
    section = configured(written)
    assert problems(section) == []
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2),
        loss_fn=section,
        policy=SimpleNamespace(train_global_batch_size=8, generation=GenerationConfig()),
    )
    loss_of(config, config.grpo)


@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate_is_chosen_by_its_name_with_its_settings(name):
    aggregation = SURROGATES[name].aggregations[0]
    section = configured({"surrogate": {"name": name}, "aggregation": aggregation})
    assert problems(section) == []
    assert section.surrogate.name == name


def test_a_setting_of_another_surrogate_and_an_unknown_one_are_refused():
    with pytest.raises(ValueError, match="tau_positive"):
        configured({"surrogate": {"name": "clip", "tau_positive": 1.0}})
    with pytest.raises(ProblemError, match=r"surrogate.name: got 'sappo'; did you mean sapo\?; allowed: clip, gspo"):
        configured({"surrogate": "sappo"})


def ahead(loss_fn):
    """Problems of a loss of rollouts that may be two steps old."""
    config = SimpleNamespace(
        grpo=GRPOConfig(
            num_prompts_per_step=4,
            num_generations_per_prompt=2,
            async_grpo=AsyncConfig(enabled=True, max_trajectory_age_steps=2),
        ),
        loss_fn=loss_fn,
        policy=SimpleNamespace(train_global_batch_size=8, generation=GenerationConfig()),
    )
    return [(problem.key, problem.message) for problem in loss_problems(config, config.grpo)]


@pytest.mark.parametrize("written", [TIS, {"ratio_denominator": "generation"}])
def test_a_loss_that_corrects_takes_older_rollouts(written):
    assert ahead(configured(written)) == []


def test_weights_by_age_need_rollouts_that_run_ahead():
    decaying = configured({**TIS, "staleness_decay": 0.9})
    assert ahead(decaying) == []
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2),
        loss_fn=decaying,
        policy=SimpleNamespace(train_global_batch_size=8, generation=GenerationConfig()),
    )
    (problem,) = loss_problems(config, config.grpo)
    assert problem.key == "loss_fn.staleness_decay"
    assert "grpo.async_grpo.enabled=true" in problem.message


def test_a_loss_that_does_not_correct_is_refused_for_older_rollouts():
    ((key, message),) = ahead(configured({}))
    assert key == "loss_fn.use_importance_sampling_correction"
    assert message.startswith("grpo.async_grpo lets rollouts be 2 steps old, for which the loss does not correct")


@pytest.mark.parametrize("reads", [True, False])
def test_a_loss_of_ones_own_takes_older_rollouts_if_it_reads_their_logprobs(tmp_path, reads):
    columns = ("loss_mask", "advantages", *(["generation_logprobs"] if reads else []))
    (tmp_path / "mine.py").write_text(LOSS_CLASS.format(columns=columns))
    written = {"name": f"{tmp_path}/mine.py:Mine"}
    found = ahead(loss_fn_section(written).model_validate(written))
    assert [key for key, _ in found] == ([] if reads else ["loss_fn.name"])


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("policy", ["split", "keep"])
def test_a_loss_of_ones_own_takes_segments_if_it_reads_what_they_are_part_of(tmp_path, reads, policy):
    (tmp_path / "mine.py").write_text(LOSS_CLASS.format(columns=("loss_mask", *(["pair"] if reads else []))))
    written = {"name": f"{tmp_path}/mine.py:Mine"}
    config = SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2, rewritten_history=policy),
        loss_fn=loss_fn_section(written).model_validate(written),
        policy=SimpleNamespace(train_global_batch_size=8, generation=GenerationConfig()),
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
