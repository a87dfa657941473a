"""Runs on nodes with several GPUs each, rehearsed on this machine: CUDA's topology, residency and transports, and their
faults. Results are compared with a plain run on the CPU.
"""

import json
import subprocess

import pytest
from logical_cluster import LogicalCluster
from runs import NUM_PROMPTS, Run, assert_same, described, logs_of, python_of, rollouts_of, steps_of
from test_judges import reward_model

from rl_algos.tiny_model import make_tokenizer
from rl_core.plugins import POLICIES
from rl_core.testing.exhaustive import exhaustive
from rl_launch.commands.replay import tensor_digest

NODES = ("cluster.device=rehearsal", "cluster.num_nodes=2", "cluster.gpus_per_node=2")
FOUR = "cluster.gpus_per_node=4"
APART = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=1")
HF = "policy.generation.backend=hf"
MEGATRON = (
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
)
TENSOR = "policy.dtensor_cfg.tensor_parallel_size=2"
NUM_STEPS = 8
LAYOUTS = {
    "dtensor": (TENSOR,),
    "dtensor, generation apart": (TENSOR, *APART),
    "megatron": MEGATRON,
    "megatron, generation apart": (*MEGATRON, *APART),
}
STEPS = f"grpo.max_num_steps={NUM_STEPS}"
DEEPSEEK = """
defaults: grpo-deepseek-v3-megatron
policy:
  precision: float32
  train_global_batch_size: 16
  max_total_sequence_length: 64
  sequence_packing: {train_mb_tokens: 128, logprob_mb_tokens: 128}
  megatron_cfg: {pipeline_model_parallel_size: 2, expert_model_parallel_size: 2}
  generation: {max_new_tokens: 16, vllm_cfg: {data_parallel_size: 2}}
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 3, val_period: 0}
data:
  train: {dataset_name: arithmetic, env_name: "digits.py:share"}
  validation: null
  default: {processor: null}
  max_input_seq_length: 32
checkpointing: {metric_name: null}
cluster: {device: rehearsal, num_nodes: 2, gpus_per_node: 2}
"""
"""The recipe on 4 GPUs instead of 512: the layers of its first and last stage, a replica over all nodes."""
ONE_RANK = (
    "policy.megatron_cfg.pipeline_model_parallel_size=1",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage=null",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage=null",
    "policy.megatron_cfg.expert_model_parallel_size=1",
    "policy.generation.vllm_cfg.tensor_parallel_size=1",
    "policy.generation.vllm_cfg.data_parallel_size=1",
    "cluster.device=cpu",
    "cluster.num_nodes=1",
    "cluster.cpu_ranks_per_node=1",
)
DIGITS = """
def share(response: str) -> float:
    return sum(each.isdigit() for each in response) / max(1, len(response))
"""
SAME = ("reward/mean", "train/loss", "train/grad_norm")


@pytest.fixture
def cluster(tmp_path):
    with LogicalCluster(tmp_path / "ray") as nodes:
        yield nodes


def assert_a_plain_run(run, whole, num_steps=NUM_STEPS):
    found = steps_of(run.folder)
    assert_same(found, steps_of(whole)[: len(found)], SAME, 1e-3)
    assert len(found) == num_steps
    assert max(line["mismatch/max"] for line in found) < 1e-3
    prompts = [row["prompt_id"] for rows in rollouts_of(run.folder).values() for row in rows]
    assert len(set(prompts)) == NUM_PROMPTS * num_steps


@exhaustive
def test_sft_over_two_nodes(sft, whole_sft, tmp_path):
    run = Run.start(tmp_path / "run", *sft, "sft.max_num_steps=5", *NODES, TENSOR)
    run.finish()
    assert_same(steps_of(run.folder), steps_of(whole_sft)[:5], ("train/loss", "train/grad_norm"), 1e-3)


@exhaustive
def test_colocated_grpo_over_two_nodes_is_a_plain_run(grpo, whole_hf, tmp_path):
    run = Run.start(tmp_path / "run", *grpo, "grpo.max_num_steps=3", HF, *NODES, TENSOR)
    run.finish()
    assert_a_plain_run(run, whole_hf, 3)


@exhaustive
def test_a_run_over_two_nodes_outlives_one(sft, whole_sft, cluster, tmp_path):
    cluster.add(num_gpus=0)
    for _ in range(3):
        cluster.add(num_gpus=1)
    run = Run.start(tmp_path / "run", *sft, *NODES, "cluster.gpus_per_node=1", RAY_ADDRESS=cluster.address)
    run.await_step(5)
    with run.paused():
        used = next(node for node in cluster.nodes[1:] if node.runs("ray::WorkerHost"))
        used.kill()
    run.finish()
    assert_same(steps_of(run.folder), steps_of(whole_sft), ("train/loss", "train/grad_norm"), 1e-3)
    assert logs_of(run.folder).count("restarting from checkpoint step_") == 1


@exhaustive
def test_a_run_with_generation_apart_outlives_a_node(grpo, whole_hf, cluster, tmp_path):
    cluster.add(num_gpus=0)
    for _ in range(3):
        cluster.add(num_gpus=2)
    arguments = (*grpo, "grpo.max_num_steps=5", HF, *NODES, *APART, TENSOR)
    run = Run.start(tmp_path / "run", *arguments, RAY_ADDRESS=cluster.address)
    run.await_step(4)
    used = next(node for node in cluster.nodes[1:] if node.runs("ray::WorkerHost"))
    used.kill()
    run.finish()
    assert_a_plain_run(run, whole_hf, 5)
    assert logs_of(run.folder).count("restarting from checkpoint step_") == 1


@exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_outlives_its_workers_and_a_node(layout, grpo, whole_hf, cluster, tmp_path):
    cluster.add(num_gpus=0)
    for _ in range(3):
        cluster.add()
    arguments = (*grpo, STEPS, HF, *NODES, FOUR, *LAYOUTS[layout])
    run = Run.start(tmp_path / "run", *arguments, RAY_ADDRESS=cluster.address)
    run.await_step(1)
    cluster.kill_one("ray::AsyncWorkerHost")
    run.await_step(2)
    cluster.kill_one("ray::RestartingHost")
    run.await_step(4)
    cluster.kill_one("ray::WorkerHost")
    # Until the run goes on: step 5 may be from before the death, and a node that dies meanwhile needs no other restart.
    run.await_log("resuming after step")
    run.await_step(5)
    used = next(node for node in cluster.nodes[1:] if node.runs("ray::WorkerHost"))
    used.kill()
    run.finish()
    assert_a_plain_run(run, whole_hf)
    assert logs_of(run.folder).count("restarting from checkpoint step_") == 2


@exhaustive
@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_a_replica_over_two_nodes_is_a_plain_run_and_is_replaced_as_one(placement, grpo, whole_grpo, cluster, tmp_path):
    own = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=2")
    num_nodes, settings = (2, ()) if placement == "colocated" else (4, own)
    cluster.add(num_gpus=0)
    for _ in range(num_nodes):
        cluster.add(num_gpus=1)
    layout = ("cluster.device=rehearsal", f"cluster.num_nodes={num_nodes}", "cluster.gpus_per_node=1")
    replica = ("policy.generation.vllm_cfg.tensor_parallel_size=2", *settings)
    run = Run.start(tmp_path / "run", *grpo, *layout, *replica, RAY_ADDRESS=cluster.address)
    num_steps = 0
    for part, words in {
        "first": "ray::AsyncWorkerHost",
        "other": "ray::AsyncWorkerHost",
        "rank": "VLLM::Worker",
    }.items():
        # The rollouts of the second step from here come from the replacement.
        run.await_step(num_steps + 2)
        with run.paused():
            generating = [node for node in cluster.nodes if node.runs("ray::AsyncWorkerHost")]
            firsts = [node for node in generating if node.runs("VLLM::EngineCore")]
            (node,) = firsts if part == "first" else [each for each in generating if each not in firsts]
            next(each for each in node.processes() if words in described(each)).kill()
            num_steps = len(steps_of(run.folder))
    run.finish()
    assert_a_plain_run(run, whole_grpo, 12)
    assert "of the replica: VllmWorker-1 was killed by SIGKILL" in logs_of(run.folder)


WRITING = """
import json, pathlib, sys
from rl_core.selfcheck.torch.tiny_model import write_tiny_model

write_tiny_model(pathlib.Path(sys.argv[1]), "deepseek_v3", **json.loads(sys.argv[2]))
"""


def write_tiny_deepseek(folder):
    """A DeepSeek-V3 with the widths of latent attention that vLLM has on a CPU."""
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
    layers = {"num_hidden_layers": 5, "first_k_dense_replace": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "initializer_range": 0.15}
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    fields = json.dumps({**sizes, **layers, **experts, **routing, **ranks, **tokens})
    subprocess.run([python_of(POLICIES, "dtensor"), "-c", WRITING, str(folder), fields], check=True)
    tokenizer.save_pretrained(folder)


@exhaustive
def test_the_recipe_of_deepseek_v3_with_a_tiny_model_is_a_run_of_one_rank(tmp_path):
    """Pipeline stages and experts over four ranks, colocated with one replica over both nodes, of two engines with two
    tensor-parallel ranks each that share the experts; weights travel whole, and in parts."""
    write_tiny_deepseek(tmp_path / "tiny-deepseek")
    (tmp_path / "digits.py").write_text(DIGITS)
    recipe = tmp_path / "deepseek.yaml"
    recipe.write_text(DEEPSEEK)
    runs = {"one": ONE_RANK, "whole": (), "parts": ("policy.generation.weight_sync_encoding=parts",)}
    found = {}
    for name, settings in runs.items():
        run = Run.start(tmp_path / name, str(recipe), f"policy.model_name={tmp_path / 'tiny-deepseek'}", *settings)
        run.finish()
        rows = [row for rows in rollouts_of(run.folder).values() for row in rows]
        completions = sorted((row["prompt_id"], row["index"], row["turns"][-1]["text"]) for row in rows)
        found[name] = steps_of(run.folder), completions
        assert ("rollout-worker-0-node-1" in logs_of(run.folder)) == (name != "one")
    steps, completions = found["one"]
    assert len(steps) == 3
    assert all(line["train/grad_norm"] > 0 for line in steps)
    for name in ("whole", "parts"):
        assert_same(found[name][0], steps, SAME, 1e-3)
        assert max(line["mismatch/max"] for line in found[name][0]) < 1e-3
        assert found[name][1] == completions, name


@exhaustive
def test_a_run_folder_that_a_node_does_not_see_is_refused(sft, cluster, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    cluster.add()
    unshared = cluster.add(hides=[folder])
    run = Run.start(folder / "run", *sft, *NODES, TENSOR, RAY_ADDRESS=cluster.address)
    run.finish(code=2)
    assert unshared.address in run.output
    assert "run_dir" in run.output
    assert "Traceback" not in run.output


@exhaustive
def test_a_reward_model_gives_the_same_rewards_on_shared_devices_and_on_its_own(grpo, tmp_path):
    settings = f"model_name: {reward_model(tmp_path / 'rm')}, precision: float32, max_total_sequence_length: 256"
    judge = f"judges.right={{kind: reward_model, {settings}}}"
    judged = (judge, "env.scored={rewards: {score: {judge: right}}}", "data.train.env_name=scored")
    arguments = (*grpo, "grpo.max_num_steps=3", HF, *judged, "cluster.device=rehearsal", FOUR)
    # The policy has one node in both.
    apart = ("judges.right.colocated.enabled=false", "judges.right.colocated.resources.num_nodes=1")
    runs = {"shared": ("cluster.num_nodes=1",), "apart": ("cluster.num_nodes=2", *apart)}
    found = []
    for name, placement in runs.items():
        run = Run.start(tmp_path / name, *arguments, *placement)
        run.finish()
        weights = tensor_digest(run.folder / "checkpoints/step_3/hf/model.safetensors")
        rewards = [
            (row["prompt_id"], row["index"], row["rewards"])
            for rows in rollouts_of(run.folder).values()
            for row in rows
        ]
        found.append((sorted(rewards, key=str), weights))
    (rewards, weights), (others, other_weights) = found
    assert len({row["score"] for _, _, row in rewards}) > 10
    assert rewards == others
    assert weights == other_weights
