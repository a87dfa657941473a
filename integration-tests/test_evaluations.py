"""`rl eval` with real engines: tasks in the hub's format, a run that scores them as it trains, and a driver that is
killed."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from runs import lines_of, steps_of

from rl_core.testing.exhaustive import exhaustive, partly_exhaustive

# its prompts are made by the driver, and not every driver has it
GYM = {"reasoning_gym/chain_sum": 6} if find_spec("reasoning_gym") else {}
SUMS = "{dataset_name: arithmetic, settings: {max_operand: 20, num_rows: 20}}"
GUESS = """
from rl_core.rollouts.environment import StepResult


class Guess:
    \"\"\"Says no to whatever it is told; the second turn is the last.\"\"\"

    def step(self, conversations, states):
        no = ({"role": "user", "content": "no"},)
        return [StepResult(done=state == 1, state=1, observation=no) for state in states]

    def close(self, states):
        pass
"""


def write(path, rows):
    """A JSON Lines or Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def downloaded(hub, name, file, rows, *, subset="default"):
    """A download of a dataset with its `test` split, as the hub's library lays it out."""
    folder = hub / f"datasets--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    write(snapshot / file, rows)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    card = f"configs:\n- config_name: {subset}\n  data_files:\n  - split: test\n    path: {file}"
    (snapshot / "README.md").write_text(f"---\n{card}\n---\n")


@exhaustive
def test_every_kind_of_task_is_scored_by_vllm(rl, warm_model, tmp_path):
    problem = {"solution": "It is \\boxed{2}.", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "a"}
    hub = tmp_path / "hub"
    downloaded(hub, "HuggingFaceH4/MATH-500", "test.jsonl", [{"problem": f"{i}+{i}=", **problem} for i in range(6)])
    question = {"question": "2+2=", "subject": "anatomy", "choices": ["3", "4", "5", "6"], "answer": 1}
    downloaded(hub, "cais/mmlu", "all/test-00000-of-00001.parquet", [question] * 5, subset="all")
    write(tmp_path / "guesses.jsonl", [{"prompt": f"{i}+1="} for i in range(4)])
    (tmp_path / "guess.py").write_text(GUESS)
    mine = f"{{name: guesses, dataset: {{data_path: {tmp_path}/guesses.jsonl, env_name: {tmp_path}/guess.py:Guess}}}}"
    result = rl(
        "eval",
        str(warm_model),
        f"eval.tasks=[{', '.join(['math_500', 'mmlu', *GYM, mine])}]",
        "eval.max_prompts=6",
        "eval.max_turns=2",
        "policy.max_total_sequence_length=512",
        "policy.precision=float32",
        "policy.generation.max_new_tokens=8",
        f"run_dir={tmp_path / 'eval'}",
        HF_HUB_CACHE=str(hub),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_CACHE=str(tmp_path / "prepared"),
    )
    assert result.code == 0, result.output
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())["tasks"]
    prompts = {name: task["num_prompts"] for name, task in found.items()}
    assert prompts == {"math_500": 6, "mmlu": 5, **GYM, "guesses": 4}
    assert not any(task["num_failed"] for task in found.values())
    # the model has learnt sums: some of the problems have the answer that the file says, and no guess is right
    assert found["guesses"]["estimates"]["mean"]["value"] == 0
    rows = [json.loads(line) for line in (tmp_path / "eval" / "rollouts.jsonl").read_text().splitlines()]
    assert {len(row["turns"]) for row in rows if row["task"] == "guesses"} == {2}
    assert len(rows) == sum(prompts.values())
    assert all(name in result.output for name in found)


def test_tasks_are_scored_as_a_run_trains_and_the_same_by_rl_eval(driver, grpo, tmp_path):
    run = tmp_path / "run"
    task = f"eval.tasks=[{{name: sums, dataset: {SUMS}}}]"
    settings = ("eval.num_samples=4", "eval.temperature=0.8")
    # vLLM scores in the tests of the quickstart
    small = (
        "policy.generation.backend=hf",
        "grpo.num_prompts_per_step=16",
        "grpo.max_num_steps=2",
        "checkpointing.save_period=2",
    )
    driver.train(run, *grpo, *small, task, *settings, "eval.period=1", "eval.at_start=true")
    lines = {line["step"]: {n: v for n, v in line.items() if n.startswith("eval/")} for line in lines_of(run)}
    assert sorted(lines) == [0, 1, 2]
    assert lines[0].keys() == lines[1].keys() == lines[2].keys() >= {"eval/sums/mean", "eval/sums/pass@4"}
    result = driver.rl("eval", f"{run}:2", task, *settings, f"run_dir={tmp_path / 'eval'}")
    assert result.code == 0, result.output
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())["tasks"]["sums"]
    estimates = {f"eval/sums/{name}": estimate["value"] for name, estimate in found["estimates"].items()}
    assert {name: lines[2][name] for name in estimates} == estimates
    assert (lines[2]["eval/sums/mean_length"], lines[2]["eval/sums/num_failed"]) == (found["mean_length"], 0)


@pytest.mark.parametrize(
    ("section", "recipe"),
    partly_exhaustive([("sft", "sft-arithmetic"), ("dpo", "dpo-tiny")], always=[("dpo", "dpo-tiny")]),
)
def test_tasks_beside_supervised_training_change_no_bit_of_it_and_are_scored_as_by_rl_eval(
    section, recipe, driver, tmp_path
):
    small = {f"{section}.val_period": 0, f"{section}.val_at_start": "false", "checkpointing.metric_name": "null"}
    small |= {"policy.model_name": "tiny-arithmetic", "checkpointing.save_period": 2}
    small["checkpointing.keep_top_k"] = "null"
    given = [f"{key}={value}" for key, value in small.items()]
    engine = ("policy.generation.backend=hf", "policy.generation.max_new_tokens=8")
    task = f"eval.tasks=[{{name: sums, dataset: {SUMS}}}]"
    settings = ("eval.num_samples=4", "eval.temperature=0.8")
    scored = (*engine, task, *settings, "eval.period=2", "eval.at_start=true")
    driver.train(tmp_path / "plain", recipe, *given, f"{section}.max_num_steps=4")
    # This run is resumed once, which scores its start no second time.
    for last in (2, 4):
        driver.train(tmp_path / "scored", recipe, *given, *scored, f"{section}.max_num_steps={last}")
    lines = {line["step"]: line for line in lines_of(tmp_path / "scored")}
    assert [step for step, line in lines.items() if "eval/sums/mean" in line] == [0, 2, 4]
    losses, weights = [], []
    for name in ("plain", "scored"):
        losses.append([line["train/loss"] for line in steps_of(tmp_path / name)])
        weights.append(tensors_of(tmp_path / name / "checkpoints/step_4/hf/model.safetensors"))
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]
    for step in (2, 4):
        place = tmp_path / f"eval-{step}"
        result = driver.rl("eval", f"{tmp_path}/scored:{step}", task, *settings, f"run_dir={place}")
        assert result.code == 0, result.output
        estimates = task_of(place, "sums")["estimates"]
        found = {name: lines[step][f"eval/sums/{name}"] for name in estimates}
        assert found == {name: estimate["value"] for name, estimate in estimates.items()}


def tensors_of(path):
    """Places of the tensors in a file, and its bytes: the library writes the entries of the header in any order."""
    file = path.read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:start]), file[start:]


@exhaustive
def test_the_stages_of_the_quickstart_differ_and_each_is_scored_as_its_run_was(rl, quickstart, warm_model, tmp_path):
    names = {"sft": str(warm_model), "grpo": ""}
    for name, model in names.items():
        given = [f"policy.model_name={model}"] if model else []
        result = rl("eval", str(quickstart / "grpo"), *given, f"run_dir={tmp_path / name}")
        assert result.code == 0, result.output
    means = {name: task_of(tmp_path / name, "validation")["estimates"]["mean"]["value"] for name in names}
    accuracy = json.loads((quickstart / "summary.json").read_text())["accuracy"]
    assert means == {"sft": accuracy["sft"], "grpo": accuracy["grpo"]}
    differ = rl("compare", str(tmp_path / "sft"), str(tmp_path / "grpo"))
    same = rl("compare", str(tmp_path / "grpo"), str(tmp_path / "grpo"))
    assert (differ.code, same.code) == (0, 0)
    assert "not significant" not in differ.output
    assert "significant" in differ.output
    assert "not significant" in same.output


def task_of(folder, name):
    return json.loads((folder / "eval.json").read_text())["tasks"][name]


GATED = """
import time
from pathlib import Path


def score(completion, answer, number):
    while number >= 1000 and not Path(__file__).with_name("open").exists():
        time.sleep(0.05)
    return float(completion.strip() == answer)
"""


@exhaustive
def test_an_evaluation_of_2000_prompts_whose_driver_is_killed_goes_on_where_it_was(rl, warm_model, tmp_path):
    folder = tmp_path / "eval"
    rows = [{"prompt": f"{i % 40}+{i // 40}=", "answer": str(i % 40 + i // 40), "number": i} for i in range(2000)]
    write(tmp_path / "sums.jsonl", rows)
    # the second half is not scored before the driver has been killed
    (tmp_path / "gated.py").write_text(GATED)
    dataset = f"{{data_path: {tmp_path}/sums.jsonl, env_name: {tmp_path}/gated.py:score}}"
    command = [
        str(Path(sys.executable).with_name("rl")),
        "eval",
        str(warm_model),
        f"eval.tasks=[{{name: sums, dataset: {dataset}}}]",
        "policy.max_total_sequence_length=32",
        "policy.precision=float32",
        "policy.generation.max_new_tokens=8",
        f"run_dir={folder}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 840
        while num_lines(folder) < 500:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
        process.kill()
        process.wait(60)
    before = (folder / "rollouts.jsonl").read_bytes()
    complete = before[: before.rindex(b"\n") + 1]
    kept = complete.count(b"\n")
    assert 500 <= kept <= 1000
    (tmp_path / "open").touch()
    result = rl("eval", str(folder))
    assert result.code == 0, result.output
    assert f"{kept} prompts " in result.output
    after = (folder / "rollouts.jsonl").read_bytes()
    assert after.startswith(complete)
    rows = [json.loads(line) for line in after.splitlines()]
    assert len({row["prompt_id"] for row in rows}) == len(rows) == 2000
    found = task_of(folder, "sums")
    assert (found["num_prompts"], found["num_failed"]) == (2000, 0)
    assert found["estimates"]["mean"]["value"] == sum(row["rewards"]["reward"] for row in rows) / 2000


def num_lines(folder):
    path = folder / "rollouts.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
