"""A student that teaches itself, with more in its prompt."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollouts_builder import make_turns
from test_distillation_plugin import POLICY, assemble, problems
from torch_model import TorchModel

from rl_algos.distillation.algorithm import train
from rl_algos.distillation.config import DistillationConfig, FollowingTeacherConfig, SelfTeacherConfig, fields_of
from rl_algos.distillation.plugin import PLUGIN
from rl_algos.distillation.self_teacher import SelfTeacher
from rl_algos.grpo.config import GRPOConfig, TeacherAdvantageConfig
from rl_algos.grpo.teacher_advantages import with_teachers
from rl_algos.judges.config import JudgesConfig
from rl_algos.losses.distillation import DistillationLoss
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.training.batch import build_batch
from rl_core.config import load, resolve
from rl_core.errors import DataError
from rl_core.model import LOGPROBS, topk
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.fakes import FakeRolloutSource, FakeRun, FakeWeights

VOCABULARY, K, TEMPERATURE = 60, 5, 0.7
SPECIAL = "distillation.self_teacher"


def encode(messages, tools):
    """A token for each character of the conversation, and two that begin the turn of the assistant."""
    text = "".join(message["content"] for message in messages) + "".join(tool["name"] for tool in tools)
    return np.array([5 + ord(letter) % 50 for letter in text] + [1, 2], dtype=np.int32)


def prompt_of(text="2+2", **info):
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": text})
    return Prompt(text, messages, encode(messages, ()), "", info, "sums")


def rollout_of(prompt, said, reward, *, feedback=""):
    sampled = [5 + ord(letter) % 50 for letter in said]
    mask = np.array([0] * len(prompt.token_ids) + [1] * len(sampled), np.uint8)
    return Rollout(
        prompt_id=prompt.id,
        tokens=np.concatenate([prompt.token_ids, sampled]).astype(np.int32),
        loss_mask=mask,
        generation_logprobs=-0.5 * mask.astype(np.float32),
        spans=(WeightSpan(1, len(sampled)),),
        turns=(Turn(said, None, {"reward": reward}, num_sampled=len(sampled)),),
        rewards={"reward": reward},
        stop_reason="stop",
        info={"feedback": feedback} if feedback else {},
    )


def teacher_of(model, *prompts, max_tokens=200, **settings):
    own = SelfTeacherConfig(prompts=list(prompts), **settings)
    return SelfTeacher(model, encode, own, [topk(K)], temperature=TEMPERATURE, max_tokens=max_tokens)


def expected(model, prompt, content, response):
    """The distributions of the model over the response, after the prompt with another last message."""
    return whole_distributions(model, prompt, content, response).topk(K, dim=-1)


def whole_distributions(model, prompt, content, response):
    messages = (prompt.messages[0], {"role": "user", "content": content})
    teacher = encode(messages, prompt.tools)
    tokens = torch.tensor(np.concatenate([teacher, response]).astype(np.int64))
    with torch.no_grad():
        logits = model.net(tokens[None]).logits[0].double() / TEMPERATURE
    return torch.log_softmax(logits, -1)[len(teacher) - 1 : -1]


def read(batch, row, start):
    return (batch.ragged(f"teacher_{name}")[row][start:] for name in ("ids", "logprobs"))


def test_responses_are_scored_as_after_the_teachers_prompt():
    model = TorchModel(VOCABULARY, seed=3, scale=10.0)
    first, second = prompt_of(answer="4"), prompt_of("17*3", answer="51")
    groups = [
        RolloutGroup.of(first, [rollout_of(first, "five", 0.0), rollout_of(first, "4", 1.0)]),
        RolloutGroup.of(second, [rollout_of(second, "51", 1.0), Rollout.failed(second, "hung")]),
    ]
    batch = build_batch(groups, DistillationConfig())
    found = teacher_of(model, "{prompt} is {answer}").scored(batch, groups)
    for row, (prompt, content) in enumerate([(first, "2+2 is 4"), (first, "2+2 is 4"), (second, "17*3 is 51")]):
        start = len(prompt.token_ids)
        ids, logprobs = read(found, row, start)
        wanted = expected(model, prompt, content, batch.ragged("tokens")[row][start:])
        np.testing.assert_array_equal(ids, wanted.indices.numpy())
        np.testing.assert_allclose(logprobs, wanted.values.numpy(), atol=1e-5)
    assert found.ragged("loss_mask").equals(batch.ragged("loss_mask"))


def test_all_turns_of_a_conversation_are_scored():
    model = TorchModel(VOCABULARY, seed=3, scale=10.0)
    prompt = prompt_of(answer="4")
    played = make_turns(prompt, [0.0, 1.0])
    response = np.arange(10, 10 + 6, dtype=np.int32)
    start = len(prompt.token_ids)
    mask = np.array([0] * start + [1, 1, 0] * 2, np.uint8)
    played = replace(
        played,
        tokens=np.concatenate([prompt.token_ids, response]),
        loss_mask=mask,
        generation_logprobs=mask.astype(np.float32),
    )
    group = RolloutGroup.of(prompt, [played])
    found = teacher_of(model, "{answer}{prompt}").scored(build_batch([group], DistillationConfig()), [group])
    ids, logprobs = read(found, 0, start)
    wanted = expected(model, prompt, "42+2", response)
    np.testing.assert_array_equal(ids, wanted.indices.numpy())
    np.testing.assert_allclose(logprobs, wanted.values.numpy(), atol=1e-5)


def test_the_first_template_that_can_be_filled_is_taken_and_rollouts_without_one_do_not_train():
    model = TorchModel(VOCABULARY, seed=3, scale=10.0)
    prompt = prompt_of()
    rollouts = [
        rollout_of(prompt, "<think>no</think>four", 1.0),  # Only others' successes help.
        rollout_of(prompt, "five", 0.0, feedback="too large"),
        rollout_of(prompt, "six", 0.25),
    ]
    group, alone = RolloutGroup.of(prompt, rollouts), RolloutGroup.of(prompt, rollouts[1:2])
    batch = build_batch([group, alone], DistillationConfig())
    teacher = teacher_of(model, "{prompt} as {success}", "{prompt} but {feedback}")
    found = teacher.scored(batch, [group, alone])
    start, tokens = len(prompt.token_ids), batch.ragged("tokens")
    for row, content in {1: "2+2 as four", 2: "2+2 as four", 3: "2+2 but too large"}.items():
        ids, _ = read(found, row, start)
        np.testing.assert_array_equal(ids, expected(model, prompt, content, tokens[row][start:]).indices.numpy())
    assert [row.any() for row in found.ragged("loss_mask")] == [False, True, True, True]
    assert teacher.metrics == {"teacher/taught": 0.75}


def test_what_does_not_fit_does_not_train_and_unknown_fields_are_refused():
    model, prompt = TorchModel(VOCABULARY), prompt_of(answer="4")
    group = RolloutGroup.of(prompt, [rollout_of(prompt, "five", 0.0), rollout_of(prompt, "4", 0.0)])
    batch = build_batch([group], DistillationConfig())
    room = len(encode(prompt.messages, ())) + len(" is 4") + 1
    found = teacher_of(model, "{prompt} is {answer}", max_tokens=room).scored(batch, [group])
    assert [row.any() for row in found.ragged("loss_mask")] == [False, True]
    with pytest.raises(DataError, match=r"prompts: prompt 2\+2 has no field hint; its fields are .*answer"):
        teacher_of(model, "{hint}{answer}").scored(batch, [group])


def test_advantages_of_a_policy_that_teaches_itself_add_up_with_those_of_rewards():
    model, prompt = TorchModel(VOCABULARY, seed=3, scale=10.0), prompt_of()
    rollouts = [rollout_of(prompt, "four", 1.0), rollout_of(prompt, "five", 0.0)]
    group = RolloutGroup.of(prompt, rollouts)
    batch = build_batch([group], GRPOConfig())
    batch = batch.with_columns({"prev_logprobs": model.infer(batch, [LOGPROBS], temperature=TEMPERATURE)["logprobs"]})
    own = SelfTeacherConfig(prompts=["{prompt} as {success}"])
    teacher = SelfTeacher(model, encode, own, [LOGPROBS], temperature=TEMPERATURE, max_tokens=99)
    config = GRPOConfig(distillation=TeacherAdvantageConfig(weight=0.5, self_teacher=own))
    found = with_teachers(np.array([1.0, -1.0]), batch, [group], teacher, config)
    start, tokens = len(prompt.token_ids), batch.ragged("tokens")
    student, knowing = (
        whole_distributions(model, prompt, content, tokens[1][start:]) for content in ("2+2", "2+2 as four")
    )
    gains = [knowing[place, token] - student[place, token] for place, token in enumerate(tokens[1][start:])]
    np.testing.assert_allclose(found.advantages[1][start:], -1 + 0.5 * np.array(gains), rtol=1e-5)
    np.testing.assert_array_equal(found.advantages[0], np.ones(len(tokens[0])))
    assert found.metrics == {"teacher/taught": 0.5, "teacher/kl": pytest.approx(-np.mean(gains), rel=1e-5)}


def test_a_rollout_that_does_not_begin_with_its_prompt_is_refused():
    prompt, other = prompt_of(answer="4"), prompt_of("17*3")
    group = RolloutGroup.of(prompt, [rollout_of(other, "five", 0.0)])
    with pytest.raises(DataError, match="does not begin with the prompt"):
        teacher_of(TorchModel(VOCABULARY), "{answer}").scored(build_batch([group], DistillationConfig()), [group])


def test_the_student_nears_itself_as_it_is_with_the_hint():
    """The loss falls while the teacher stays the initial student."""

    class Reference(TorchModel):
        def infer(self, batch, reads, *, reference=False, temperature=1.0):
            assert reference
            return initial.infer(batch, reads, temperature=temperature)

        def update_reference(self, share=1.0):
            shares.append(share)

    shares: list[float] = []
    initial, student = (kind(VOCABULARY, seed=5, scale=20.0, lr=3e-3) for kind in (TorchModel, Reference))
    own = FollowingTeacherConfig(prompts=["{prompt} is {answer}"], weights="reference", sync_period=8, mixup_alpha=0.5)
    config = DistillationConfig(
        num_prompts_per_step=4, num_generations_per_prompt=2, max_num_steps=24, self_teacher=own, topk_logits_k=K
    )
    loss, run = DistillationLoss(temperature=TEMPERATURE), FakeRun()
    prompts = [prompt_of(f"{i % 7}+{i % 3}", answer=str(i % 7 + i % 3)) for i in range(96)]
    source = FakeRolloutSource(prompts, lambda prompt, tokens: 0.0, num_generations=2)
    teacher = SelfTeacher(student, encode, own, [topk(K)], temperature=TEMPERATURE, max_tokens=99)
    steps = RolloutSteps(config, source, FakeWeights(student), None, run)
    train(config, loss, policy=student, teachers=teacher, steps=steps, rows_per_minibatch=8)
    losses = [run.metrics[step]["train/loss"] for step in range(1, 25)]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) / 2
    assert shares == [0.5] * 3
    assert run.metrics[1]["teacher/taught"] == 1.0


def config(tmp_path, *overrides):
    sections = {**PLUGIN.sections, "distillation": DistillationConfig, "judges": JudgesConfig}
    root = assemble("Root", {**sections, "policy": POLICY, "env": assemble("Environments", {})})
    path = tmp_path / "self.yaml"
    path.write_text("policy: {model_name: tiny, train_global_batch_size: 32}\n")
    return resolve(load(str(path), ["data.train={dataset_name: arithmetic}", *overrides], search=[]), root).config


def test_no_other_model_is_needed(tmp_path):
    assert "teachers.NAME.model_name" in problems(PLUGIN, config(tmp_path))["teacher"].remedy
    plain = config(tmp_path, SPECIAL + "={prompts: ['{prompt} {answer}']}")
    assert problems(PLUGIN, plain) == {}
    assert {name: need.spec.keeps_reference for name, need in PLUGIN.models(plain).items()} == {"policy": False}
    lagged = config(tmp_path, SPECIAL + "={prompts: ['{prompt}'], weights: reference, sync_period: 5}")
    assert PLUGIN.models(lagged)["policy"].spec.keeps_reference


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["{prompts: ['{prompt'], weights: current}"], f"{SPECIAL}.prompts.0", "expected '}'"),
        (["{prompts: ['{}']}"], f"{SPECIAL}.prompts.0", "fields have names"),
        (["{prompts: [a], sync_period: 3}"], f"{SPECIAL}.sync_period", "weights=current"),
        (["{prompts: [a], success_threshold: 0.5}"], f"{SPECIAL}.success_threshold", "no template"),
        (
            ["{prompts: ['{success}']}", "distillation.num_generations_per_prompt=1"],
            "distillation.num_generations_per_prompt",
            "another rollout",
        ),
        (["{prompts: [a]}", "distillation.topk_logits_k=null"], "distillation.topk_logits_k", "driver"),
        (["{prompts: [a]}", "distillation.cross_tokenizer=true"], "distillation.cross_tokenizer", "other tokens"),
        (["{prompts: [a]}", "distillation.rewritten_history=split"], "distillation.rewritten_history", "segments"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, overrides, key, says):
    found = problems(PLUGIN, config(tmp_path, f"{SPECIAL}={overrides[0]}", *overrides[1:]))
    assert says in f"{found[key].reason} {found[key].remedy}"


def test_braces_that_are_text():
    assert fields_of("{{x}} {answer}") == {"answer"}
