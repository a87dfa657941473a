"""Both kinds of distillation from the config to trained weights, with models of torch in this process."""

import json

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_level
from torch_model import TorchModel

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_examples
from rl_algos.distillation import algorithm as distillation_algorithm
from rl_algos.distillation.algorithm import (
    DistillationValidation,
    OfflineDistillation,
    distillation_loss_of,
    teachers_of,
    to_batch,
    train,
)
from rl_algos.distillation.config import DistillationConfig, DistillationLossConfig, OfflineDistillationConfig
from rl_algos.distillation.plugin import OFFLINE
from rl_algos.distillation.span_teacher import SpanTeacher, Translator
from rl_algos.distillation.teachers import Teachers
from rl_algos.losses.distillation import HEAD_ERROR, SPAN_METRICS, SpanLoss
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.tokenizer import encode_prompt
from rl_core.config import assemble
from rl_core.model import HIDDEN, LOGPROBS
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.run import Components
from rl_core.testing.fakes import FakeRolloutSource, FakeRun, FakeWeights

ROOT = assemble(
    "Root",
    {
        "policy": ModelConfig,
        "teacher": ModelConfig,
        "data": DataConfig,
        "distillation": OfflineDistillationConfig,
        "loss_fn": DistillationLossConfig,
    },
)


def text_config(folder, *, kind, k):
    path = folder / "sums.jsonl"
    rows = [{"messages": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return ROOT(
        policy=ModelConfig(model_name="tiny", train_global_batch_size=16, max_total_sequence_length=32),
        teacher=ModelConfig(model_name="tiny"),
        data=DataConfig(train={"data_path": str(path)}, validation={"data_path": str(path)}),
        distillation=OfflineDistillationConfig(
            max_num_steps=40, val_period=0, val_at_start=True, val_at_end=True, topk_logits_k=k
        ),
        loss_fn=DistillationLossConfig(kl_type=kind),
    )


@pytest.mark.parametrize(("kind", "k"), [("forward", 8), ("reverse", None), ("mixed", 8), ("jensen_shannon", 8)])
def test_on_text_a_smaller_student_nears_its_teacher(tmp_path, tokenizer, kind, k):
    config = text_config(tmp_path, kind=kind, k=k)
    assert [problem for check in OFFLINE.checks for problem in check(config)] == []
    data = OfflineDistillation().prepare(config, tokenizer, load_examples(config))
    teacher = TorchModel(len(tokenizer), hidden_size=48, seed=1, scale=20.0)
    student = TorchModel(len(tokenizer), seed=2)
    run = FakeRun()
    OfflineDistillation().run(config, Components(models={"policy": student, "teacher": teacher}, data=data), run)
    before, after = run.metrics[0], run.metrics[40]
    assert after["val/loss"] < before["val/loss"] / 4
    assert after["val/forward_kl"] < before["val/forward_kl"] / 3
    assert set(OFFLINE.validation_metrics(config)) <= set(before)
    assert teacher.num_steps == 0
    if k is None:
        assert before["val/teacher_tail"] < 1e-5


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed", "jensen_shannon"])
def test_hidden_states_of_a_teacher_teach_as_its_whole_distributions_do(tmp_path, tokenizer, monkeypatch, kind):
    teacher = TorchModel(len(tokenizer), hidden_size=48, seed=1, scale=20.0)
    teacher.net.save_pretrained(tmp_path / "teacher")
    named = ModelConfig(model_name=str(tmp_path / "teacher"), precision="float32")
    runs = []
    for most_bytes in (8, 2**16):
        monkeypatch.setattr(distillation_algorithm, "MAX_BYTES", most_bytes)
        config = text_config(tmp_path, kind=kind, k=None)
        settings = config.distillation.model_copy(update={"max_num_steps": 3})
        loss_fn = config.loss_fn.model_copy(update={"nll_weight": 0.2, "temperature": 0.7})
        config = config.model_copy(update={"teacher": named, "distillation": settings, "loss_fn": loss_fn})
        data = OfflineDistillation().prepare(config, tokenizer, load_examples(config))
        run = FakeRun()
        models = {"policy": TorchModel(len(tokenizer), seed=2), "teacher": teacher}
        OfflineDistillation().run(config, Components(models=models, data=data), run)
        runs.append(run.metrics)
    by_hidden, whole = runs
    assert whole.keys() == by_hidden.keys()
    for step, metrics in whole.items():
        for name in ("loss", "forward_kl", "reverse_kl", "nll"):
            for key in (f"train/{name}", f"val/{name}"):
                if key in metrics:
                    assert by_hidden[step][key] == pytest.approx(metrics[key], rel=1e-4), (step, key)
    assert by_hidden[0]["val/teacher_head_error"] < 1e-5
    assert "val/teacher_head_error" not in whole[0]


def test_hidden_states_of_teachers_of_several_sizes_teach_as_their_whole_distributions_do(
    tmp_path, tokenizer, monkeypatch
):
    models, named = {}, {}
    for seed, (name, size) in enumerate({"sums": 48, "products": 24}.items(), start=3):
        models[f"teacher_{name}"] = TorchModel(len(tokenizer), hidden_size=size, seed=seed, scale=20.0)
        models[f"teacher_{name}"].net.save_pretrained(tmp_path / name)
        named[name] = ModelConfig(model_name=str(tmp_path / name), precision="float32")
    one = text_config(tmp_path, kind="mixed", k=None)
    root = assemble(
        "Several",
        {
            "policy": ModelConfig,
            "teachers": assemble("Teachers", dict.fromkeys(named, ModelConfig)),
            "data": DataConfig,
            "distillation": OfflineDistillationConfig,
            "loss_fn": DistillationLossConfig,
        },
    )
    config = root(policy=one.policy, teachers=named, data=one.data, distillation=one.distillation, loss_fn=one.loss_fn)
    data = OfflineDistillation().prepare(one, tokenizer, load_examples(one))
    rows = to_batch(next(iter(data.validation.values()))[0][:8])
    runs = []
    for most_bytes in (8, 2**16):
        monkeypatch.setattr(distillation_algorithm, "MAX_BYTES", most_bytes)
        loss, teachers = (
            distillation_loss_of(config, vocabulary=data.vocabulary),
            teachers_of(config, Components(models, data)),
        )
        student = TorchModel(len(tokenizer), seed=2)
        scored = teachers.scored_rows(
            rows, ["teacher_sums", "teacher_products", "teacher_products", "teacher_sums"] * 2
        )
        runs.append([student.train_step(scored, loss) for _ in range(3)])
    for by_hidden, whole in zip(*runs, strict=True):
        for key in ("loss", "forward_kl", "reverse_kl"):
            assert by_hidden[key].result() == pytest.approx(whole[key].result(), rel=1e-4), key
    assert runs[0][0][HEAD_ERROR].result() < 1e-5


def test_a_head_that_is_not_the_teachers_is_seen(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(distillation_algorithm, "MAX_BYTES", 8)
    teacher = TorchModel(len(tokenizer), hidden_size=48, seed=1, scale=20.0)
    teacher.net.save_pretrained(tmp_path / "teacher")
    with torch.no_grad():
        teacher.net.lm_head.weight *= 2
    named = ModelConfig(model_name=str(tmp_path / "teacher"), precision="float32")
    config = text_config(tmp_path, kind="forward", k=None).model_copy(update={"teacher": named})
    data = OfflineDistillation().prepare(config, tokenizer, load_examples(config))
    scored = Teachers({"teacher": teacher}, [HIDDEN, LOGPROBS], temperature=1.0).scored_rows(
        to_batch(next(iter(data.validation.values()))[0][:4]), ["teacher"] * 4
    )
    found = TorchModel(len(tokenizer), seed=2).evaluate(
        scored, distillation_loss_of(config, vocabulary=data.vocabulary)
    )
    assert found[HEAD_ERROR].result() > 0.1


WORDS = ("twelve", "plus", "makes", "twenty-four", "naïve", "café")


class Speaker(FakeRolloutSource):
    """Rollouts of words, in the student's tokens."""

    def __init__(self, prompts, tokenizer):
        super().__init__(prompts, lambda prompt, sampled: 0.0)
        self._tokenizer = tokenizer

    def _rollout(self, prompt, draw, place):
        random = np.random.default_rng((draw, place))
        said = " ".join(random.choice(WORDS, 3))
        sampled = [*self._tokenizer(said, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        mask = np.array([0] * len(prompt.token_ids) + [1] * len(sampled), np.uint8)
        return Rollout(
            prompt_id=prompt.id,
            tokens=np.concatenate([prompt.token_ids, sampled]).astype(np.int32),
            loss_mask=mask,
            generation_logprobs=mask.astype(np.float32),
            spans=(WeightSpan(self.versions[-1], len(sampled)),),
            turns=(Turn(said, None, {"reward": 0.0}),),
            rewards={"reward": 0.0},
            stop_reason="stop",
        )


def test_a_teacher_with_other_tokens_teaches_the_likelihood_of_what_the_student_says():
    student_tokenizer, teacher_tokenizer = byte_level(270), byte_level(330)
    messages = ({"role": "user", "content": "Say it."},)
    prompts = [
        Prompt(f"p{number}", messages, encode_prompt(student_tokenizer, messages), "", {}, "words")
        for number in range(400)
    ]
    teacher = TorchModel(len(teacher_tokenizer), hidden_size=48, seed=1, scale=8.0)
    student, run, loss = TorchModel(len(student_tokenizer), seed=2, lr=5e-3), FakeRun(), SpanLoss(tau=10.0)
    translator = Translator(student_tokenizer, teacher_tokenizer, key="teacher.model_name")
    scorer = SpanTeacher(teacher, translator, max_tokens=64, temperature=1.0)
    config = DistillationConfig(
        num_prompts_per_step=4, num_generations_per_prompt=4, max_num_steps=30, val_period=30, val_at_start=True
    )
    validation = DistillationValidation(student, scorer, loss, prompts[-4:], SamplingParams(max_new_tokens=8), config)
    steps = RolloutSteps(config, Speaker(prompts, student_tokenizer), FakeWeights(student), validation, run)
    train(config, loss, policy=student, teachers=scorer, steps=steps, rows_per_minibatch=16)
    before, after = run.metrics[0], run.metrics[30]
    assert {f"val/{name}" for name in SPAN_METRICS} <= set(before)
    assert before["val/tokens_per_span"] > 1.2  # the teacher's tokens hold several of the student's
    assert after["val/loss"] < before["val/loss"] / 2
    assert after["val/span_logprob_gap"] < before["val/span_logprob_gap"]
    assert torch.isfinite(torch.tensor([metrics["train/loss"] for step, metrics in run.metrics.items() if step])).all()
