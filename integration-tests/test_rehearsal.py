"""Runs on nodes with several GPUs each, rehearsed on this machine: CUDA's topology, residency and transports, and their
faults. Results are compared with a plain run on the CPU.
"""

import pytest
from logical_cluster import LogicalCluster
from runs import NUM_PROMPTS, Run, assert_same, described, logs_of, rollouts_of, steps_of
from test_judges import reward_model

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
