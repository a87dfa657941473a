"""The loop of GRPO with teachers."""

import numpy as np
import pytest

from rl_algos.distillation.teachers import Teachers
from rl_algos.grpo.advantages import grpo
from rl_algos.grpo.config import GRPOConfig, TeacherAdvantageConfig
from rl_algos.grpo.loop import train
from rl_algos.grpo.plugin import PLUGIN
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_core.config import assemble, load, resolve
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights


class Marked(FakeModel):
    """A teacher that gives every token the same logprob."""

    def __init__(self, mark):
        super().__init__()
        self._mark = mark

    def infer(self, batch, reads, **options):
        found = super().infer(batch, reads, **options).ragged("logprobs")
        return Batch({"logprobs": found.like(np.full_like(found.values, self._mark))})


def run_loop(run, models, environments, **settings):
    config = GRPOConfig(
        num_prompts_per_step=len(environments),
        num_generations_per_prompt=4,
        max_num_steps=1,
        distillation=TeacherAdvantageConfig(**settings),
    )
    prompts = [
        Prompt(f"p{number}", (), np.arange(2, dtype=np.int32), environment, {}, "sums")
        for number, environment in enumerate(environments)
    ]
    policy = FakeModel()
    source = FakeRolloutSource(prompts, lambda prompt, tokens: float(np.mean(tokens % 2 == 0)), num_generations=4)
    validation = Validation([], SamplingParams(max_new_tokens=3), config)
    train(
        config,
        Objective(PolicyLoss(on_policy=True), read_before=("prev_logprobs",)),
        policy=policy,
        steps=RolloutSteps(config, source, FakeWeights(policy), validation, run),
        rows_per_minibatch=4 * len(environments),
        teachers=Teachers(models, [LOGPROBS], temperature=1.0),
    )
    return policy


def test_rows_go_to_the_teacher_of_their_environment_and_others_learn_from_rewards():
    run, marks = FakeRun(), {"math": -1.0, "chess": -3.0}
    models = {f"teacher_{name}": Marked(mark) for name, mark in marks.items()}
    policy = run_loop(run, models, ["math", "chess", "code"], weight=0.5, reward_weight=2.0)
    assert run.phases[1:] == ["generation", "logprobs", "teacher", "training", "weight_sync"]
    (batch,) = [batch for name, batch in policy.calls if name == "train_step"]
    rewards = np.array([np.mean(row[2:] % 2 == 0) for row in batch.ragged("tokens")])
    expected = grpo(rewards, np.repeat(np.arange(3), 4))
    kl = []
    for row, name in enumerate(np.repeat(["math", "chess", "code"], 4)):
        sampled, prev = batch.ragged("loss_mask")[row] > 0, batch.ragged("prev_logprobs")[row]
        gain = np.where(sampled, marks[name] - prev, 0.0) if name in marks else np.zeros(len(prev))
        np.testing.assert_allclose(batch.ragged("advantages")[row], 2 * expected[row] + 0.5 * gain, rtol=1e-5)
        kl += (-gain[sampled]).tolist() if name in marks else []
    assert run.metrics[1]["teacher/kl"] == pytest.approx(np.mean(kl), rel=1e-5)
    assert [len(model.calls) for model in models.values()] == [1, 1]


def test_a_step_without_a_row_that_has_a_teacher_learns_from_rewards():
    policy = run_loop(FakeRun(), {"teacher_math": FakeModel()}, ["code"] * 3)
    (batch,) = [batch for name, batch in policy.calls if name == "train_step"]
    rewards = np.array([np.mean(row[2:] % 2 == 0) for row in batch.ragged("tokens")])
    expected = np.repeat(grpo(rewards, np.repeat(np.arange(3), 4)), batch.lengths)
    np.testing.assert_allclose(batch.ragged("advantages").values, expected, rtol=1e-5)


OWN = "grpo.distillation.self_teacher"


def config(tmp_path, *overrides, teacher=True):
    path = tmp_path / "taught.yaml"
    path.write_text("policy: {model_name: tiny, train_global_batch_size: 512}\n")
    raw = load(str(path), ["data.train={dataset_name: arithmetic}", *overrides], search=[])
    policy = assemble("Policy", {"generation": GenerationConfig}, base=ModelConfig)
    models = {"policy": policy, **({"teacher": ModelConfig} if teacher else {})}
    sections = {key: kind if isinstance(kind, type) else kind(raw.select(key)) for key, kind in PLUGIN.sections.items()}
    return resolve(raw, assemble("Root", {**sections, **models, "env": assemble("Environments", {})})).config


def problems(config):
    return {problem.key: problem for check in PLUGIN.checks for problem in check(config)}


def test_teachers_are_models_of_the_run_that_do_not_train(tmp_path):
    taught = config(tmp_path, "teacher.model_name=a")
    assert problems(taught) == {}
    needs = PLUGIN.models(taught)
    assert {role: need.spec.trains for role, need in needs.items()} == {"policy": True, "teacher": False}
    assert PLUGIN.optional_models[:2] == ("teacher", "teachers.*")


def test_a_policy_that_teaches_itself_may_read_with_its_reference(tmp_path):
    written = OWN + "={prompts: ['{prompt} {answer}'], weights: reference}"
    others = ["loss_fn.kl.weight=0", "grpo.reference_sync_period=1", "grpo.reference_mixup_alpha=0.05"]
    taught = config(tmp_path, written, *others, teacher=False)
    assert problems(taught) == {}
    assert PLUGIN.models(taught)["policy"].spec.keeps_reference
    current = config(tmp_path, OWN + "={prompts: ['{prompt} {answer}']}", *others, teacher=False)
    assert not PLUGIN.models(current)["policy"].spec.keeps_reference
    assert problems(current).keys() == {"grpo.reference_sync_period"}


def test_one_rollout_of_a_prompt_is_enough_if_only_teachers_teach(tmp_path):
    alone = ["teacher.model_name=a", "grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"]
    assert "compared" in problems(config(tmp_path, *alone))["grpo.num_generations_per_prompt"].reason
    assert problems(config(tmp_path, *alone, "grpo.distillation.reward_weight=0")) == {}


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["grpo.distillation.weight=0.5"], "grpo.distillation.weight", "without a teacher"),
        (["teacher.model_name=a", OWN + "={prompts: [a]}"], OWN, "there is also teacher"),
        (
            ["teacher.model_name=a", "teacher.max_total_sequence_length=9"],
            "teacher.max_total_sequence_length",
            "must be at least",
        ),
        (
            ["teacher.model_name=a", "grpo.distillation.reward_weight=0", "grpo.adv_estimator=rloo"],
            "grpo.adv_estimator",
            "reward_weight=0",
        ),
        ([OWN + "={prompts: [a]}", "grpo.rewritten_history=split"], "grpo.rewritten_history", "segments"),
        (["teacher.model_name=a", "grpo.structured_output=constrain"], "grpo.structured_output", "all tokens"),
        (
            [OWN + "={prompts: ['{success}']}", "grpo.num_generations_per_prompt=1"],
            "grpo.num_generations_per_prompt",
            "another rollout",
        ),
    ],
)
def test_settings_that_contradict_one_another_are_refused(tmp_path, overrides, key, says):
    has_teacher = any(each.startswith("teacher") for each in overrides)
    found = problems(config(tmp_path, *overrides, teacher=has_teacher))
    assert says in f"{found[key].reason} {found[key].remedy}"
