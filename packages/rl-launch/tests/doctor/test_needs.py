"""What is read from a recipe."""

import json

import pytest

from rl_core.devices import CPU, CUDA
from rl_core.errors import ConfigError
from rl_launch.doctor.needs import needs_of


def names(needs):
    return {role: str(spec.wanted[0]) for role, spec in needs.workers.items()}


def test_the_device_follows_the_machine_unless_the_recipe_says():
    assert needs_of("grpo-arithmetic", [], num_gpus=0).device == CPU
    assert needs_of("grpo-arithmetic", [], num_gpus=8).device == CUDA
    assert needs_of("grpo-arithmetic", ["cluster.device=cpu"], num_gpus=8).device == CPU
    assert needs_of("grpo-math-1b", [], num_gpus=0).device == CUDA


def test_workers_bring_the_builds_for_the_device():
    on_cpu = needs_of("grpo-arithmetic", [], num_gpus=0)
    assert names(on_cpu) == {"policy": "rl-dtensor[worker]", "generation": "rl-vllm[cpu]", "env.math": "rl-envs"}
    assert names(needs_of("grpo-math-1b", [], num_gpus=0))["generation"] == "rl-vllm[cuda]"
    assert set(names(needs_of("sft-arithmetic", [], num_gpus=0))) == {"policy"}


def test_environments_that_datasets_name_are_needed():
    needs = needs_of("grpo-arithmetic", ["data.train.env_name=reasoning_gym"], num_gpus=0)
    assert "env.reasoning_gym" in names(needs)


def test_ranks_and_the_folder_of_runs_come_from_the_config():
    needs = needs_of("grpo-arithmetic", ["cluster.cpu_ranks_per_node=4", "run_dir=/data/runs/one"], num_gpus=0)
    assert needs.ranks_per_node == 4
    assert str(needs.runs) == "/data/runs"


def test_a_rehearsal_counts_the_engines_of_all_nodes_and_the_cpu_one():
    rehearsed = ["cluster.device=rehearsal", "cluster.gpus_per_node=4", "cluster.num_nodes=2"]
    needs = needs_of("grpo-arithmetic", rehearsed, num_gpus=0)
    assert (needs.num_ranks, needs.num_engines) == (8, 8)
    assert (needs_of("grpo-arithmetic", [], num_gpus=0).num_engines, needs.num_nodes) == (1, 2)
    assert needs_of("sft-arithmetic", rehearsed, num_gpus=0).num_engines == 0


def test_a_wrong_config_is_refused():
    with pytest.raises(ConfigError, match=r"grpo\.sede .* grpo\.seed\?"):
        needs_of("grpo-arithmetic", ["grpo.sede=1"], num_gpus=0)


def models_of(recipe, *overrides):
    return {model.role: model for model in needs_of(recipe, overrides, num_gpus=0).models}


def test_more_nodes_spread_the_optimizer_but_not_the_weights_of_megatron():
    small, large = (models_of("grpo-math-70b-megatron", f"cluster.num_nodes={nodes}")["policy"] for nodes in (8, 16))
    # TP 4 x PP 8: a 32nd of 70B in bfloat16 and of its float32 gradients, and float32 state over 2 or 4 ranks
    assert small.device_bytes == 70e9 / 32 * (2 + 4 + 12 / 2)
    assert large.device_bytes == 70e9 / 32 * (2 + 4 + 12 / 4)
    # the policy waits with its weights and state, but without gradients, next to the reference in bfloat16
    assert large.host_bytes == 8 * 70e9 / 32 * (2 + 2 + 12 / 4)
    assert small.checkpoint_bytes == large.checkpoint_bytes == 14 * 70e9
    assert needs_of("grpo-math-70b-megatron", [], num_gpus=0).num_checkpoints == 5


def test_a_model_that_does_not_take_turns_stays_out_of_host_memory():
    apart = ["loss_fn.kl.weight=0", "policy.generation.colocated.enabled=false", "cluster.num_nodes=2"]
    apart += ["policy.generation.colocated.resources.num_nodes=1"]
    for overrides, waits in ((apart[:1], True), (apart, False)):
        assert bool(models_of("grpo-math-8b", *overrides)["policy"].host_bytes) == waits


def test_every_model_of_a_run_is_counted_and_only_those_that_train_are_saved():
    found = models_of("distill-math")
    assert set(found) == {"policy", "teacher"}
    assert all(model.device_bytes for model in found.values())
    assert (found["policy"].checkpoint_bytes > 0, found["teacher"].checkpoint_bytes) == (True, 0)


def test_the_size_comes_from_the_config_with_overrides_and_otherwise_from_the_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    chosen, overridden = "policy.model_name=org/model-7B", "policy.hf_config_overrides.num_hidden_layers=5"
    assert models_of("sft-arithmetic", chosen)["policy"].basis == "7.0B parameters by its name"
    # the name states the size of the model without the overrides
    assert models_of("sft-arithmetic", chosen, overridden)["policy"].device_bytes is None
    snapshot = tmp_path / "models--org--model-7B" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    fields = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
    }
    (snapshot / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2, "vocab_size": 32}))
    layer, ends = 3 * 8 * 8 + 3 * 8 * 16, 2 * 32 * 8
    for overrides, layers in ((), 2), ((overridden,), 5):
        found = models_of("sft-arithmetic", chosen, *overrides)["policy"]
        assert found.checkpoint_bytes == 14 * (layers * layer + ends)
        assert found.basis.endswith("by config.json")


def test_frozen_parameters_need_their_weights_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    fields = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    (snapshot / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2, "vocab_size": 32}))
    layer, end = 4 * 8 * 8 + 3 * 8 * 16, 32 * 8
    model = ("policy.model_name=org/model", "policy.precision=bfloat16")
    whole = models_of("sft-arithmetic", *model)["policy"]
    assert whole.ranks * whole.device_bytes == 16 * (2 * layer + 2 * end)
    frozen = models_of("sft-arithmetic", *model, "policy.freeze=[model.embed_tokens, model.layers.0]")["policy"]
    assert frozen.ranks * frozen.device_bytes == 16 * (layer + end) + 2 * (layer + end)
    muon = ["policy.optimizer.name=torch.optim.Muon", "policy.optimizer.kwargs={lr: 1.0e-4, betas: null, eps: null}"]
    found = models_of("sft-arithmetic", *model, *muon)["policy"]
    assert found.ranks * found.device_bytes == 12 * 2 * layer + 16 * 2 * end


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (["keep_top_k=3", "metric_name=null"], 4),
        (["keep_top_k=3", "metric_name='val:accuracy'"], 5),
        (["keep_top_k=null"], None),
        (["enabled=false"], 0),
    ],
)
def test_checkpoints_are_counted_with_the_one_being_written(settings, count):
    needs = needs_of("grpo-math-1b", [f"checkpointing.{each}" for each in settings], num_gpus=0)
    assert needs.num_checkpoints == count


def test_servers_elsewhere_are_asked_and_take_no_place_on_the_machine():
    elsewhere = [
        "policy.generation.backend=server",
        "policy.generation.colocated.enabled=false",
        "policy.generation.server_cfg.urls=[http://127.0.0.1:1]",
    ]
    needs = needs_of("grpo-arithmetic", elsewhere, num_gpus=0)
    (problem,) = needs.server_problems()
    refused = "the server http://127.0.0.1:1 cannot be reached: "
    assert problem.startswith(f"policy.generation.server_cfg.urls.0: {refused}")
    assert (needs.num_engines, names(needs)["generation"]) == (0, "rl-algos[torch]")
    assert needs_of("grpo-arithmetic", [], num_gpus=0).server_problems is None
