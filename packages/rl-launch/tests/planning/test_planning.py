"""`rl plan`: sizes against published ones, verdicts, changes that fit, factors of runs, and simulations."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rl_core.devices import CUDA
from rl_core.errors import ConfigError
from rl_core.facts.rank_layout import RankLayout
from rl_core.testing.isolation import loaded_by
from rl_launch.commands.planning import plan_recipe
from rl_launch.planning.accelerators import DECODE_MEMORY, accelerator_named, accelerator_of
from rl_launch.planning.changes import with_values
from rl_launch.planning.learned import learn, learned, measured_lengths
from rl_launch.planning.memory import GIB
from rl_launch.planning.plan import plan_run
from rl_launch.planning.planned_steps import PhaseMemory, PlannedSteps
from rl_launch.planning.seconds import Machines, decode_seconds
from rl_launch.planning.shapes import Shape, published_fields
from rl_launch.planning.simulation import Engines, Faults, Setting, SimulatedSteps, best_save_seconds, goodput, simulate
from rl_launch.planning.text import lines
from rl_launch.planning.what_if import RunFacts, cases, simulated
from rl_launch.planning.workload import Lengths
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.observer import ObservedRun

NO_LENGTHS = Lengths()


def planned(recipe, *overrides, device="h100", lengths=NO_LENGTHS):
    return plan_run(
        read_plan(recipe, overrides), recipe, accelerator=accelerator_named(device), device=CUDA, lengths=lengths
    )


def answer(recipe, *overrides, device="h100", searches=False):
    return plan_recipe(recipe, overrides, device=device, lengths=NO_LENGTHS, searches=searches)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-7B", 7.62),
        ("Qwen/Qwen3-8B", 8.19),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.55),
        ("Qwen/Qwen3-30B-A3B", 30.5),
        ("Qwen/Qwen3-235B-A22B", 235),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7),
        ("deepseek-ai/DeepSeek-V3", 671),
        ("meta-llama/Llama-3.1-405B", 405.9),
        ("openai/gpt-oss-120b", 116.8),
        ("moonshotai/Kimi-K2-Instruct", 1026),
        ("zai-org/GLM-4.5-Air", 106.8),
        ("google/gemma-2-9b-it", 9.24),
        ("microsoft/phi-4", 14.66),
        ("allenai/OLMo-2-1124-13B", 13.72),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345),
        ("mistralai/Mistral-Small-24B-Instruct-2501", 23.57),
    ],
)
def test_published_shapes_have_the_published_numbers_of_parameters(name, billions):
    assert Shape.of(published_fields(name)).size.count == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "none", "selective", "full"),
    [
        ("Qwen3-8B", 137e3, 94.3e3, 8.2e3),
        ("Qwen3-30B-A3B", 114e3, 84.4e3, 4.1e3),
        ("Llama-3.3-70B", 275e3, 201e3, 16.4e3),
        ("DeepSeek-V3", 552e3, 401e3, 14.3e3),
    ],
)
def test_a_layer_keeps_what_the_ledger_counts_on_real_layers(name, none, selective, full):
    """The figures of `benchmarks/results/ledger.md`, in bytes of a token."""
    shape = Shape.of(published_fields(name))
    kept = shape.kept(RankLayout(), 2, has_experts=bool(shape.experts))
    found = (kept.none, kept.selective, kept.full)
    assert found == pytest.approx((none, selective, full), rel=0.1)


def test_a_model_of_unknown_shape_has_a_verdict_without_times():
    plan = planned("sft-squad", "policy.model_name=org/new-7B")
    assert plan.seconds.get("training") is None
    assert any("activations and time are not estimated" in problem for problem in plan.problems)
    assert planned("sft-squad", "policy.model_name=org/nothing").fits is None


def test_an_unknown_device_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"--device: got 'h1000'; allowed: b200, h200, h100"):
        accelerator_named("h1000")
    assert accelerator_of("NVIDIA H100 80GB HBM3").name == "h100"
    assert accelerator_of("NVIDIA A100-SXM4-80GB").name == "a100"
    assert accelerator_of("NVIDIA H100 PCIe").name == "h100-pcie"
    assert accelerator_of("Some GPU") is None


def test_more_memory_of_any_kind_is_never_less():
    one, two = (planned("grpo-math-8b", f"cluster.num_nodes={nodes}") for nodes in (1, 2))
    weights = [plan.usages[0].device["weights"] for plan in (one, two)]
    assert weights[0] == pytest.approx(2 * weights[1])
    assert two.step_seconds < one.step_seconds
    longer = planned("grpo-math-8b", lengths=Lengths(500, 3000))
    assert longer.step_seconds > planned("grpo-math-8b", lengths=Lengths(500, 300)).step_seconds


@pytest.mark.parametrize("device", ["rtx4090", "a100-40"])
def test_the_smallest_change_fits_when_it_is_made(device):
    found = answer("grpo-math-8b", device=device)
    assert found.plan.fits is False
    overrides = found.change.overrides.split()
    assert answer("grpo-math-8b", *overrides, device=device).plan.fits


def test_an_engine_that_is_too_small_for_its_model_is_named():
    found = answer("grpo-math-70b-megatron", "policy.generation.vllm_cfg.tensor_parallel_size=1")
    assert found.plan.fits is False
    assert "raise the engine's tensor_parallel_size" in found.plan.problems[0]
    assert "tensor_parallel_size=" in found.change.overrides


def test_every_recipe_is_planned():
    for name in (name for name in recipe_names() if not name.endswith("-tiny")):
        found = planned(name)
        assert found.usages or found.problems, name


def test_values_are_changed_without_reading_the_config_again():
    run = read_plan("grpo-math-8b")
    values = {"policy.sequence_packing.train_mb_tokens": 4096, "cluster.num_nodes": 2}
    changed = with_values(run, values)
    assert changed.config.policy.sequence_packing.train_mb_tokens == 4096
    assert changed.backends.models["policy"].config.sequence_packing.train_mb_tokens == 4096
    assert run.config.cluster.num_nodes == 1


def test_a_plan_needs_no_engine():
    found = loaded_by("rl_launch.commands.planning", "rl_launch.cli.plan_commands")
    assert not found & {"torch", "ray", "transformers", "vllm", "megatron", "datasets"}


def test_a_plan_of_the_command_line_loads_no_torch():
    code = (
        "import sys; from rl_launch.cli.app import app\n"
        "try: app(['plan', 'grpo-math-8b', '--device', 'h100', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert shown["fits"] is True
    assert shown["fullest"]["bytes"] < shown["device_bytes"]


def run_with(folder, *rows):
    path = folder / "run"
    path.mkdir()
    (path / "config.yaml").write_text("algorithm: sft\n")
    (path / "run.json").write_text("{}")
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFolder(path)


def test_factors_of_a_run_correct_later_plans(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    plan = planned("grpo-math-8b")
    took = {"training": 2.0, "generation": 1.5, "weight_sync": 3.0}
    tensors = {usage.phase: usage.tensors for usage in plan.usages if usage.role == "policy"}
    row = {f"time/{phase}": factor * plan.seconds[phase] for phase, factor in took.items()}
    row |= {"memory/policy/training_gib": 1.2 * tensors["training"] / GIB, "memory/policy-0/training_gib": 1.0}
    run = run_with(tmp_path, *({"step": step, **row} for step in range(1, 6)))
    assert learned("h100").seconds == {}
    factors = learn(run, plan)
    assert factors.seconds == pytest.approx(took)
    assert factors.memory == pytest.approx({"training": 1.2})
    # The same run again replaces what it taught.
    assert learn(run, plan).runs == factors.runs
    corrected = answer("grpo-math-8b")
    assert corrected.plan.seconds["training"] == pytest.approx(2 * plan.seconds["training"])
    # Passes that no run had are corrected as training is; a save is not.
    assert corrected.plan.seconds["logprobs"] == pytest.approx(2 * plan.seconds["logprobs"])
    assert corrected.plan.seconds["save"] == pytest.approx(plan.seconds["save"])
    now = {usage.phase: usage for usage in corrected.plan.usages if usage.role == "policy"}
    assert now["training"].tensors == pytest.approx(1.2 * tensors["training"])
    assert now["training"].total - now["training"].tensors == pytest.approx(
        next(usage.total - usage.tensors for usage in plan.usages if usage.phase == "training")
    )
    shown = "\n".join(lines(corrected.plan, price=None, change=None))
    assert "(x 1.20 by 1 run)" in shown
    assert "(x 3.00 by 1 run)" in shown


def test_rollouts_take_time_of_the_host_next_to_their_tokens():
    """Twice the rollouts of half the tokens, decoded in the same batch, take a millisecond more for each."""
    seconds = []
    for group, length in ((64, 100.0), (128, 50.0)):
        overrides = [f"grpo.num_generations_per_prompt={group}", "grpo.num_prompts_per_step=4"]
        run = read_plan("grpo-math-1b", [*overrides, "policy.train_global_batch_size=256"])
        lengths = Lengths(0.0, length, length)
        plan = plan_run(run, "run", accelerator=accelerator_named("h100"), device=CUDA, lengths=lengths)
        seconds.append((plan.seconds["generation"], plan.topology.num_replicas))
    (few, replicas), (many, _) = seconds
    assert many - few == pytest.approx(256 / replicas * 0.001, rel=0.2)


def training_seconds(recipe, *overrides, **more):
    return planned(recipe, *overrides, **more).seconds["training"]


def test_what_is_recomputed_takes_time():
    """Selective recomputation repeats kernels, full recomputation also a third of the products."""
    none, selective, full = (
        training_seconds("sft-squad", "policy.model_name=Llama-3.1-8B", f"policy.dtensor_cfg.recompute={choice}")
        for choice in ("none", "selective", "full")
    )
    assert none < selective < full
    assert full / none == pytest.approx(4 / 3, rel=0.05)


def test_a_pipeline_is_filled_again_for_each_update():
    keys = ["policy.megatron_cfg.pipeline_model_parallel_size=4", "policy.megatron_cfg.tensor_model_parallel_size=1"]
    keys += ["policy.megatron_cfg.sequence_parallel=false", "policy.megatron_cfg.recompute=full"]
    one, four = (
        training_seconds(
            "grpo-math-8b-megatron", *keys, f"policy.train_global_batch_size={rows}", lengths=Lengths(1, 3000)
        )
        for rows in (2048, 512)
    )
    # Each of two data-parallel ranks has 512 microbatches; three of them are a bubble.
    assert four / one == pytest.approx((1 + 4 * 3 / 512) / (1 + 3 / 512), rel=3e-3)


def test_a_decoding_step_reads_keys_and_values_after_its_weights():
    plan = planned("grpo-math-8b")
    chip = plan.machines.accelerator
    short, long = (decode_seconds(plan.engine, 64, row, plan.machines) for row in (500, 1500))
    read = 64 * 1000 * plan.engine.cache_of_token
    assert long - short == pytest.approx(read / (DECODE_MEMORY * chip.memory_rate))
    assert short > plan.engine.weights / chip.memory_rate


def test_small_experts_are_read_more_slowly_than_large_ones():
    """Seconds of a token for each byte of the experts that are met, by one sequence."""
    found = {}
    for name in ("Mixtral-8x7B", "Qwen3-30B-A3B"):
        engine = planned("grpo-math-8b", f"policy.model_name={name}", device="b200").engine
        fewer = replace(engine, size=replace(engine.size, experts=0))
        chip = accelerator_named("b200")
        more = decode_seconds(engine, 1, 1, Machines(chip, 8)) - decode_seconds(fewer, 1, 1, Machines(chip, 8))
        met = engine.size.experts * engine.shape.active_share * engine.layout.weight_bytes
        found[name] = more * chip.memory_rate / met
    assert found["Mixtral-8x7B"] == pytest.approx(1 / 0.9, rel=0.02)
    assert found["Qwen3-30B-A3B"] > 1.2 * found["Mixtral-8x7B"]


def test_links_that_reach_further_than_a_node_carry_its_exchanges():
    keys = ["policy.model_name=Qwen3-30B-A3B", "cluster.gpus_per_node=4", "cluster.num_nodes=4"]
    keys += ["policy.dtensor_cfg.expert_parallel_size=16", "policy.train_global_batch_size=128"]
    joined, apart = (training_seconds("sft-squad", *keys, device=device) for device in ("gb200", "b200"))
    assert joined < 0.7 * apart


def test_a_weight_sync_takes_time_for_each_tensor():
    dense, sparse = (planned("grpo-math-8b", f"policy.model_name={name}") for name in ("Qwen3-32B", "Qwen3-30B-A3B"))
    assert sparse.seconds["weight_sync"] > dense.seconds["weight_sync"] + 48 * 128 * 3 * 1e-4 - 1.0


def test_generation_that_overlaps_training_and_small_peaks_teach_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    row = {"time/generation": 5.0, "time/training": 5.0, "idle/trainer": 0.1, "memory/policy/training_gib": 0.5}
    run = run_with(tmp_path, {"step": 1, **row})
    factors = learn(run, planned("grpo-math-8b"))
    assert factors.seconds.keys() == {"training"}
    assert learn(run, planned("sft-tiny", device="cpu")).memory == {}


def test_lengths_of_a_run_are_those_of_its_metrics():
    plan = planned("grpo-math-8b")
    rows = plan.work.num_rows
    row = {"rollout/mean_length": 300.0, "rollout/max_length": 900.0, "train/num_tokens": 450.0 * rows}
    first = {"rollout/mean_length": 1.0, "rollout/max_length": 1.0, "train/num_tokens": 1.0}
    found = measured_lengths([first, first, row], plan.work)
    assert found == (150.0, 300.0, 900.0)
    assert planned("grpo-math-8b", lengths=found).work.longest == 900
    assert measured_lengths([{"train/num_tokens": 64.0 * rows}], plan.work) == (None, 64.0, None)
    # A validation at the start is no step.
    assert measured_lengths([{"step": 0}, {**first, "step": 1}, {**first, "step": 2}, row], plan.work) == found


def test_steps_record_the_plan_and_the_memory_of_phases(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    steps = PlannedSteps(read_plan("grpo-math-8b", ["cluster.device=cuda"]), "grpo-math-8b", lambda: ["NVIDIA H100"])
    steps.begin(ObservedRun("run", tmp_path, {}, 0))
    plan, found = planned("grpo-math-8b"), steps.step_metrics()
    assert found["plan/step"] == pytest.approx(plan.step_seconds)
    tensors = next(usage.tensors for usage in plan.usages if usage.phase == "training")
    assert found["plan/policy/training_memory_gib"] == pytest.approx(tensors / GIB)

    class Ranks:
        def __init__(self, *reports):
            self.health = lambda: [{"pid": 1, **report} for report in reports]

    two = Ranks({"peak_bytes": {"training": GIB}}, {"peak_bytes": {"training": 2 * GIB, "save": GIB}})
    memory = PhaseMemory({"policy": two, "judge": Ranks({}), "critic": Ranks(*[{"peak_bytes": {"save": GIB}}] * 17)})
    assert memory.step_metrics() == {
        "memory/policy/training_gib": 2.0,
        "memory/policy-0/training_gib": 1.0,
        "memory/policy-1/training_gib": 2.0,
        "memory/policy/save_gib": 1.0,
        "memory/policy-0/save_gib": 0.0,
        "memory/policy-1/save_gib": 1.0,
        "memory/critic/save_gib": 1.0,
    }


def test_a_run_without_common_phases_teaches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    run = run_with(tmp_path, {"step": 1, "time/judging": 1.0})
    with pytest.raises(ConfigError, match="nothing to learn"):
        learn(run, planned("sft-squad"))


LENGTHS = [10, 20, 20, 40, 80, 400]
"""Tokens of the rollouts of a step."""


def run_with_rollouts(folder, **row):
    """A run of five steps that all took what the row says."""
    run = run_with(folder, *({"step": step, "time/weight_sync": 1.0, **row} for step in range(1, 6)))
    (run.path / "rollouts").mkdir()
    for step in range(1, 4):
        written = (json.dumps({"num_sampled": length}) + "\n" for length in LENGTHS)
        (run.path / "rollouts" / f"step_{step}.jsonl").write_text("".join(written))
    return run


def test_a_run_as_it_was_takes_its_own_time_in_the_simulation(tmp_path):
    run = run_with_rollouts(tmp_path, **{"time/generation": 12.0, "time/training": 7.0, "time/step": 20.0})
    facts = RunFacts.of_run(run, planned("grpo-math-1b"))
    assert facts.lengths == tuple(LENGTHS * 3)
    assert (facts.train_seconds, facts.update_seconds, facts.is_shared) == (7.0, 1.0, True)
    found = {case.name: case.found.step_seconds for case in cases(facts)}
    assert found["synchronous"] == pytest.approx(20.0, rel=0.1)
    # Rows have prompts too, which do not grow.
    grown = (facts.prompt + 2 * facts.completion) / (facts.prompt + facts.completion)
    assert found["completions twice as long, synchronous"] == pytest.approx(2 * 12 + grown * 7 + 1, rel=0.1)
    assert found["half of all devices, synchronous"] == pytest.approx(2 * 12 + 2 * 7 + 1, rel=0.1)


def test_a_run_with_rollouts_ahead_of_training_says_how_long_it_generates_by_its_idle_replicas(tmp_path):
    ahead = {"idle/trainer": 0.0, "idle/generators": 0.25}
    run = run_with_rollouts(tmp_path, **ahead, **{"time/generation": 0.0, "time/step": 20.0})
    facts = RunFacts.of_run(run, planned("grpo-math-1b"))
    assert (facts.train_seconds, facts.generation_seconds) == (19.0, 15.0)


def test_a_plan_is_simulated_with_lengths_of_its_mean_and_maximum(tmp_path):
    plan = planned("grpo-math-1b", lengths=Lengths(100, 300))
    facts = RunFacts.of_plan(plan)
    assert facts.completion == pytest.approx(300, rel=0.01)
    assert max(facts.lengths) <= plan.work.longest
    assert next(cases(facts)).found.step_seconds == pytest.approx(plan.step_seconds, rel=0.1)
    run = run_with_rollouts(tmp_path)
    found = simulated(plan, run, has_times=False)
    assert found.source == f"the planned times and 18 rollouts of {run.path}, 1 replica of 256 slots"
    assert len(found.as_json()["cases"]) == len(found.cases) == len(list(found.lines())) - 3


def test_what_cannot_be_simulated_says_why(tmp_path):
    run = run_with(tmp_path, {"step": 1})
    found = simulated(planned("grpo-math-1b"), run, has_times=True)
    assert list(found.lines()) == ["", f"Not simulated: {run.path} has no rollouts to simulate from."]
    assert "generates nothing" in simulated(planned("sft-squad"), None, has_times=False).problem


def test_simulated_steps_of_equal_lengths_take_what_a_clock_says():
    engines = Engines(2, 4, 100, 100, 0.1, 0.0, lengths=(100,))
    steps = SimulatedSteps(prompts=8, group=1, steps=6)
    assert simulate(steps, engines, Setting(7.0, 0)).step_seconds == pytest.approx(10 + 7)
    # While the policy trains, the next rollouts are made.
    assert simulate(steps, engines, Setting(7.0, 1, in_flight=True)).step_seconds == pytest.approx(10, abs=0.6)
    assert simulate(steps, engines, Setting(20.0, 1, in_flight=True)).step_seconds == pytest.approx(20, abs=0.6)


def test_goodput_is_best_near_the_period_of_the_formula():
    faults = Faults(500, 0, 10_000, 600.0, 0.0)
    step, save = 100.0, 20.0
    best = round(best_save_seconds(save, faults) / step)
    shares = {period: goodput(step, save, period, faults, hours=20_000).goodput for period in (1, best, 20 * best)}
    assert max(shares, key=shares.get) == best
    assert goodput(step, 0.0, 1, Faults(500, 0, 1e9, 600.0, 0.0), hours=100).goodput == pytest.approx(1.0)
