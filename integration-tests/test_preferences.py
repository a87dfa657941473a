"""Preferences from data to a policy and to a reward model, and that reward model as the environment of a policy."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from runs import by_transformers, lines_of, rollouts_of, steps_of

from rl_algos.dpo.algorithm import DPO
from rl_algos.preference.data import pair_rows
from rl_algos.tiny_model import make_tokenizer
from rl_core.testing.documents import read_document
from rl_core.testing.exhaustive import exhaustive
from rl_launch.run_config.reading import read_plan

ROOT = Path(__file__).parents[1]

SCORES = """
import json, sys
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
scores = []
for talk in json.load(sys.stdin):
    ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)["input_ids"]
    scores.append(model(torch.tensor([ids])).logits.item())
print("scores", json.dumps(scores))
"""

HELD_OUT = {"train": "train", "validation": "held_out"}
SMALL = ("dpo.val_period=0", "dpo.val_at_end=true", "checkpointing.metric_name=null")


def scores_of(folder, talks):
    """Scores of conversations by a reward model in transformers, which the trainer's environment has."""
    return json.loads(by_transformers(SCORES, folder, given=json.dumps(talks)).rpartition("scores ")[2])


@pytest.fixture(scope="session")
def reward_model(once, driver, warm_model):
    """Folder of a run that trains a reward model."""
    settings = (f"policy.model_name={warm_model}", "rm.max_num_steps=150", "rm.val_period=50")
    return once("reward-model", lambda folder: driver.train(folder, "rm-tiny", *settings))


@exhaustive
def test_a_policy_learns_what_is_preferred(driver, warm_model, tmp_path):
    driver.train(tmp_path / "run", "dpo-tiny", f"policy.model_name={warm_model}", "dpo.max_num_steps=30", *SMALL)
    start, first, *_, last = lines_of(tmp_path / "run")
    assert start["step"] == 0
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert last["val/accuracy"] > start["val/accuracy"] + 0.1
    assert last["val/margin"] > 0.05


@exhaustive
@pytest.mark.parametrize(("section", "recipe"), [("sft", "sft-arithmetic"), ("dpo", "dpo-tiny"), ("rm", "rm-tiny")])
def test_validation_changes_no_bit_of_the_training(section, recipe, driver, tmp_path):
    given = (f"{section}.max_num_steps=4", "policy.model_name=tiny-arithmetic", "checkpointing.metric_name=null")
    weights, losses = [], []
    for period in (0, 1):
        folder = tmp_path / str(period)
        validates = (f"{section}.val_period={period}", f"{section}.val_at_start={str(period > 0).lower()}")
        driver.train(folder, recipe, *given, *validates)
        file = (folder / "checkpoints/step_4/hf/model.safetensors").read_bytes()
        start = 8 + int.from_bytes(file[:8], "little")
        # The library writes the entries of the header in any order.
        weights.append((json.loads(file[8:start]), file[start:]))
        losses.append([line["train/loss"] for line in steps_of(folder)])
    assert sum("val/loss" in line for line in lines_of(tmp_path / "1")) == 5
    assert not any("val/loss" in line for line in lines_of(tmp_path / "0"))
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]


@exhaustive
def test_a_process_reward_model_learns_which_step_is_wrong(driver, tmp_path):
    """A step is a digit, and right if it is even."""
    random, rows = np.random.default_rng(0), []
    for _ in range(500):
        digits = random.integers(0, 10, 3).tolist()
        steps = {"completions": [str(digit) for digit in digits], "labels": [digit % 2 == 0 for digit in digits]}
        rows.append(json.dumps({"prompt": "1+1=", **steps}))
    for name, part in (("train", rows[:400]), ("held_out", rows[400:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    data = [f"data.{key}={{data_path: {tmp_path}/{name}.jsonl}}" for key, name in HELD_OUT.items()]
    learns = ("rm.loss=process", "rm.step_end=;", "rm.max_num_steps=60", "rm.val_period=0", "rm.val_at_end=true")
    small = ("policy.model_name=tiny-arithmetic", "policy.train_global_batch_size=16", "checkpointing.metric_name=null")
    driver.train(tmp_path / "run", "rm-tiny", *data, *learns, *small)
    first, last = [line for line in lines_of(tmp_path / "run") if "val/accuracy" in line]
    assert first["val/num_steps"] == 300
    assert last["val/accuracy"] > 0.95


@exhaustive
def test_a_reward_model_loads_in_transformers_and_tells_right_from_wrong(reward_model):
    lines = steps_of(reward_model)
    assert lines[-1]["val/accuracy"] > 0.6
    folder = reward_model / "checkpoints" / f"step_{lines[-1]['step']}" / "hf"
    sums = np.random.default_rng(0).integers(0, 50, (40, 2)).tolist()
    answers = [(f"{a}+{b}=", str(answer)) for a, b in sums for answer in (a + b, a + b + 3)]
    talks = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in answers
    ]
    scores = np.array(scores_of(folder, talks)).reshape(-1, 2)
    right = scores[:, 0] > scores[:, 1]
    assert np.mean(right) > 0.5


@exhaustive
def test_a_reward_model_scores_rollouts(driver, grpo, reward_model, tmp_path):
    folder = next((reward_model / "checkpoints").glob("step_*")) / "hf"
    environment = f"env.preferred={{type: reward_model, model: {folder}, max_batch: 64}}"
    settings = ("grpo.max_num_steps=1", "policy.generation.backend=hf", "data.train.env_name=preferred", environment)
    driver.train(tmp_path / "run", *grpo, *settings)
    rows = rollouts_of(tmp_path / "run")[1][:8]
    talks = [[*row["prompt"], {"role": "assistant", "content": row["turns"][-1]["text"]}] for row in rows]
    found = [row["rewards"]["reward"] for row in rows]
    assert found == pytest.approx(scores_of(folder, talks), abs=1e-3)


def test_the_rows_and_the_processor_of_the_guide_give_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = read_document(ROOT / "docs/preferences-and-reward-models.md")
    for block in document.blocks:
        if block.file.endswith((".jsonl", ".py", ".yaml")):
            (tmp_path / block.file).write_text(block.text)

    def pairs(*overrides):
        config = read_plan("votes.yaml", overrides).config
        tokenizer = make_tokenizer()
        [dataset] = DPO().load(config).train
        rows = pair_rows(dataset, config.data, tokenizer, 64, pairing="best-worst")

        def said(side):
            return tokenizer.decode(side.tokens[side.loss_mask == 1]).removesuffix("<|end|>").replace(" ", "")

        return [(said(row.chosen), said(row.rejected), row.margin) for row in rows]

    assert pairs() == [("56", "54", 8.0), ("2", "3", 4.0)]
    implicit = pairs("data.train.data_path=implicit.jsonl", "data.train.processor=null")
    assert implicit == [("2", "Itis3.", None), ("7", "9", None)]
