"""`rl plan` of a run: what it took next to what was planned, and what it refuses; the warning of `rl train`."""

import json
import logging

import pytest

from rl_core.errors import ConfigError
from rl_launch.commands.planning import plan_recipe
from rl_launch.planning.memory import GIB
from rl_launch.planning.planned_steps import PlannedSteps
from rl_launch.planning.text import as_json, lines
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.observer import ObservedRun

STEP = {"time/training": 2.0, "time/data": 0.5, "time/step": 2.5, "train/num_tokens": 1280.0}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def answer(recipe="", *overrides, device=None, lengths=None, **options):
    return plan_recipe(recipe, overrides, device=device, lengths=lengths or Lengths(), searches=False, **options)


@pytest.fixture
def run(tmp_path):
    """Return a function that makes the folder of a run of `sft-tiny` with these steps."""

    def made(*rows):
        folder = tmp_path / "run"
        folder.mkdir()
        config = read_plan("sft-tiny", ["cluster.device=cpu"]).raw.plain()
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML.
        (folder / "run.json").write_text("{}")
        numbered = ({"step": step, **row} for step, row in enumerate(rows, 1))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
        return str(folder)

    return made


def test_a_run_is_shown_next_to_its_plan(run):
    memory = {"memory/policy/training_gib": 1.5, "memory/policy-0/training_gib": 1.0}
    folder = run(*[STEP | memory] * 5)
    for found in (answer(folder), answer(run=folder)):
        assert found.took.seconds == {"training": 2.0, "data": 0.5, "step": 2.5}
        assert found.took.memory == {("policy", "training"): 1.5 * GIB}
        shown = "\n".join(lines(found.plan, price=None, change=None, took=found.took))
        assert "measured, of tensors             1.61  planned" in shown
        columns = {line.split()[0]: line for line in shown.splitlines() if line.endswith(" s")}
        assert columns["data"].split() == ["data", "-", "0.5", "s"]
        assert columns["training"].endswith("2 s")
        json_ = as_json(found.plan, price=None, change=None, found=(), took=found.took)
        assert json_["measured"]["memory"] == [{"role": "policy", "phase": "training", "bytes": 1.5 * GIB}]
    # Another config has lengths of the run, and was not measured.
    other = answer(folder, "policy.train_global_batch_size=64")
    assert other.took is None
    assert other.plan.work.completion == 10.0
    assert answer("sft-tiny", run=folder).took is None


def test_a_run_without_steps_is_planned_but_cannot_be_taken_from(run):
    folder = run({"val/loss": 2.0, "time/validation": 1.0})
    assert answer(folder).took is None
    with pytest.raises(ConfigError, match="no step of this run has ended yet"):
        answer("sft-tiny", run=folder)


def test_a_run_on_unknown_gpus_teaches_only_for_a_named_device(run):
    folder = run(*[STEP | {"system/gpu_utilization": 0.9}] * 3)
    with pytest.raises(ConfigError, match="Name theirs with --device"):
        answer(run=folder, learns=True)
    assert answer(run=folder, learns=True, device="h100").plan.factors.runs == (folder,)


@pytest.mark.parametrize("text", ["[1, 2", "[]", '{"run": {"seconds": {"training": -1}}}', '{"run": {"other": {}}}'])
def test_damaged_factors_are_refused_with_their_file(home, text):
    (home / "plans").mkdir(parents=True)
    (home / "plans" / "h100.json").write_text(text)
    with pytest.raises(ConfigError, match=r"plans/h100.json does not have the factors of runs: .* Remove it"):
        answer("sft-squad")


@pytest.mark.parametrize(
    ("recipe", "lengths", "message"),
    [
        ("grpo-math-8b", Lengths(None, 1e6), r"--tokens: got 1e\+06, but a completion has at most 3,072 tokens"),
        ("sft-squad", Lengths(None, 5000.0), "--tokens: got 5,000, but a row has at most 1,024 tokens"),
        ("grpo-math-8b", Lengths(4096.0), "--prompt-tokens: got 4,096, but policy.max_total_sequence_length leaves"),
    ],
)
def test_lengths_that_no_row_has_are_refused(recipe, lengths, message):
    with pytest.raises(ConfigError, match=message):
        answer(recipe, lengths=lengths)


def test_an_evaluation_has_memory_and_no_step(tmp_path):
    path = tmp_path / "scored.yaml"
    policy = "policy: {model_name: Qwen/Qwen2.5-32B, max_total_sequence_length: 4096, generation: {max_new_tokens: 64}}"
    cluster = "cluster: {device: cuda, gpus_per_node: 8}"
    path.write_text(f"algorithm: evaluation\n{policy}\neval: {{tasks: [math_500]}}\n{cluster}\n")
    found = answer(str(path), device="l4")
    assert found.plan.fits is False
    assert found.plan.seconds == {}
    assert found.change.overrides == "policy.generation.vllm_cfg.tensor_parallel_size=4"
    with pytest.raises(ConfigError, match="--search: evaluation trains no model"):
        plan_recipe(str(path), (), device="l4", lengths=Lengths(), searches=True)


def test_a_layout_that_the_ranks_of_a_device_do_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 needs .* cluster.cpu_ranks_per_node"):
        answer("dpo-helpsteer3", device="cpu")


@pytest.mark.parametrize(
    ("recipe", "overrides", "named"),
    [
        ("sft-squad", (), "training of the policy takes most"),
        ("ppo-math-1b", (), "training of the critic takes"),
        ("distill-math", ("teacher.model_name=Qwen/Qwen2.5-72B",), "logprobs of the teacher takes most"),
        (
            "grpo-math-32b",
            ("policy.generation.vllm_cfg.tensor_parallel_size=1",),
            "raise the engine's tensor_parallel_size",
        ),
    ],
)
def test_a_run_whose_gpus_are_too_small_for_a_model_is_warned_of(tmp_path, caplog, recipe, overrides, named):
    def begun(gpus):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run = read_plan(recipe, ["cluster.device=cuda", *overrides])
            PlannedSteps(run, recipe, lambda: gpus).begin(ObservedRun(recipe, tmp_path, {}, 0))
        return caplog.text

    assert named in (text := begun(["NVIDIA GeForce RTX 4090"]))
    assert f"rl plan {tmp_path} --device rtx4090 shows the smallest change that fits" in text
    # Nobody knows whether it fits GPUs that are not here.
    assert not begun([])


def test_all_adapters_of_a_shared_base_are_counted():
    one, eight = (answer("sft-lora", f"policy.lora_cfg.max_adapters={count}").plan.usages[0].device for count in (1, 8))
    assert eight["optimizer state"] == pytest.approx(8 * one["optimizer state"])
