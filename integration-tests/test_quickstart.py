"""`rl quickstart` makes a model that improves, correct figures, and files that others can load."""

import json
import subprocess

import pytest
from runs import by_transformers, python_of

from rl_core.plugins import GENERATORS, POLICIES
from rl_core.testing.exhaustive import exhaustive


def newest_model(run_dir):
    return max((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1])) / "hf"


NUM_STEPS = 24
"""Number of steps of the quickstart's GRPO."""


def test_sft_and_then_grpo_raise_the_accuracy_on_held_out_sums(quickstart):
    # benchmarks/results/quickstart.md has the ends over seeds and kinds of rounding that these bounds are below
    accuracy = json.loads((quickstart / "summary.json").read_text())["accuracy"]
    assert accuracy["initial"] < 0.05
    assert accuracy["sft"] > accuracy["initial"] + 0.2
    assert accuracy["grpo"] > accuracy["sft"] + 0.05


def test_trainer_and_generator_agree_over_the_whole_run(quickstart, metrics):
    lines = [line for line in metrics(quickstart / "grpo") if "mismatch/max" in line]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line["mismatch/max"] for line in lines) < 1e-3


def test_every_step_publishes_its_own_weight_version_and_trains_on_the_one_before(quickstart, metrics):
    for line in metrics(quickstart / "grpo"):
        if line["step"] == 0:
            continue
        assert line["weight_version"] == line["step"] + 1
        first = (quickstart / "grpo" / "rollouts" / f"step_{line['step']}.jsonl").read_text().splitlines()[0]
        assert json.loads(first)["weight_versions"] == [line["step"]]


def test_no_prompt_is_rolled_out_twice_in_an_epoch(quickstart):
    prompts = []
    for step in range(1, NUM_STEPS + 1):  # of 64 prompts, within the first epoch of 2250
        rows = [json.loads(row) for row in (quickstart / "grpo" / "rollouts" / f"step_{step}.jsonl").open()]
        assert len(rows) == 512
        prompts += sorted({row["prompt_id"] for row in rows})
    assert len(prompts) == len(set(prompts)) == NUM_STEPS * 64


def test_the_final_checkpoint_loads_in_transformers_and_answers(quickstart):
    script = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert not any(report.values()), report
tokenizer = AutoTokenizer.from_pretrained(folder)
question = [{"role": "user", "content": "2+3="}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1]:]
print("answer", tokenizer.decode(answer, skip_special_tokens=True))
"""
    assert by_transformers(script, newest_model(quickstart / "grpo")).split()[-1].isdigit()


@exhaustive
def test_the_final_checkpoint_loads_in_vllm_and_scores_there_as_the_run_says(driver, quickstart, tmp_path):
    # no policy, and so no weight sync: the replica serves what it read from disk
    result = driver.rl("eval", str(quickstart / "grpo"), f"run_dir={tmp_path / 'eval'}")
    assert result.code == 0, result.output
    task = json.loads((tmp_path / "eval" / "eval.json").read_text())["tasks"]["validation"]
    accuracy = json.loads((quickstart / "summary.json").read_text())["accuracy"]["grpo"]
    assert task["estimates"]["mean"]["value"] == pytest.approx(accuracy)


def test_worker_environments_hold_their_own_engine_alone():
    trainer, rollouts = python_of(POLICIES, "dtensor"), python_of(GENERATORS, "vllm")
    probe = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"

    def present(python, *names):
        return subprocess.run([python, "-c", probe, *names], capture_output=True, text=True, check=True).stdout.strip()

    assert present(trainer, "torch", "vllm", "rl_dtensor", "ray") == "['torch', 'rl_dtensor', 'ray']"
    assert present(rollouts, "vllm", "rl_dtensor", "rl_vllm", "ray") == "['vllm', 'rl_vllm', 'ray']"
