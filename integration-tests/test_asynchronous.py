"""Rollouts ahead of training: with no lead the run is the synchronous one, and none is lost whatever happens."""

import random
import signal
import sys
import time
from contextlib import ExitStack, suppress
from itertools import pairwise

import psutil
import pytest
from logical_cluster import LogicalCluster
from runs import NUM_PROMPTS, Run, assert_same, described, rollouts_of, steps_of

from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli.failure import UNFINISHED
from rl_launch.run_session.directory.exactly_once import prove
from rl_launch.run_session.directory.run_folder import RunFolder

HF = "policy.generation.backend=hf"
AHEAD = (
    HF,
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "loss_fn.importance.high=2.0",
    "grpo.async_grpo.enabled=true",
)
PROCESSES = ("ray::WorkerHost", "ray::AsyncWorkerHost", "ray::RestartingHost", "environments.process")
DRIVER, NODE, EVERYTHING = "the driver alone", "a node", "everything"
ELASTIC = (
    *("policy.generation.min_replicas=1", "policy.generation.max_replicas=2"),
    *("cluster.device=rehearsal", "cluster.gpus_per_node=2"),
)
LONG = (
    # an untrained model rarely ends a completion early, and with this rate every version has the same weights
    "policy.model_name=tiny-arithmetic",
    "policy.optimizer.kwargs.lr=0.0",
    "policy.max_total_sequence_length=384",
    "policy.generation.max_new_tokens=320",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=4",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=2",
)
SAME = ("reward/mean", "train/loss", "train/grad_norm")


def test_an_age_of_0_is_the_synchronous_run(driver, grpo, whole_hf, tmp_path):
    at_once = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0")
    driver.train(tmp_path / "run", *grpo, "grpo.max_num_steps=3", HF, *at_once)
    assert_same(steps_of(tmp_path / "run"), steps_of(whole_hf)[:3], SAME, 0.0)


@exhaustive
@pytest.mark.parametrize("killed", ["ray::AsyncWorkerHost", "ray::WorkerHost"])
def test_a_run_ahead_of_training_keeps_its_bound_and_loses_no_prompt(grpo, tmp_path, killed):
    run = Run.start(tmp_path / "run", *grpo, "grpo.max_num_steps=6", "checkpointing.save_period=2", *AHEAD)
    run.await_step(3)
    run.kill_one(killed)
    run.finish()
    steps = steps_of(run.folder)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert max(line["staleness/max"] for line in steps) == 1
    assert steps[1]["staleness/share_1"] > 0.9
    prompts = [row["prompt_id"] for rows in rollouts_of(run.folder).values() for row in rows if row["index"] == 0]
    assert len(set(prompts)) == len(prompts) == NUM_PROMPTS * 6
    proof = prove(RunFolder(run.folder))
    assert (proof.contradictions, proof.gaps) == ((), ())
    assert proof.num_compared == 6


# rl-launch proves the same of sessions that are killed after each kind of record, and `test_rehearsal` loses a node
@exhaustive
def test_no_prompt_is_lost_or_trained_twice_whatever_is_killed(num_kills, grpo, tmp_path):
    """A trainer, a replica, a process of the environments, the driver, a node or all of it is killed at random moments,
    `--kills` times; the proof must hold after each.
    """
    seed = random.randrange(2**32)
    sys.stdout.write(f"kills were drawn with seed {seed}\n")
    chance = random.Random(seed)
    num_steps = 3 * num_kills + 5
    arguments = (*grpo, f"grpo.max_num_steps={num_steps}", "checkpointing.save_period=1", *AHEAD, *ELASTIC)
    with ElasticRun(tmp_path, arguments) as elastic:
        num_done = 1
        for number in range(num_kills):
            elastic.run.await_step(num_done + 1)
            time.sleep(chance.uniform(0, 2))
            victim = elastic.kill(chance)
            # the kill may have cost the steps since the newest checkpoint
            num_done = len(steps_of(elastic.run.folder))
            # which also takes time, in which the run may have ended
            elastic.run.await_step(min(num_done + 1, num_steps))
            proof = prove(RunFolder(elastic.run.folder))
            assert proof.contradictions == (), victim
            sys.stdout.write(f"{number + 1}: {victim}: the proof holds at step {proof.step}\n")
            sys.stdout.flush()
        elastic.run.finish()
    proof = prove(RunFolder(elastic.run.folder))
    assert (proof.step, proof.num_compared) == (num_steps, num_steps)
    assert (proof.contradictions, proof.gaps, proof.num_pending) == ((), (), 0)
    assert proof.num_trained == NUM_PROMPTS * num_steps


class ElasticRun:
    """A run on two nodes, the second of which has nothing but a replica.

    Args:
        folder: for the run and for Ray's files.
        arguments: of the run.
    """

    def __init__(self, folder, arguments):
        self._folder = folder
        self._arguments = arguments
        self._exit = ExitStack()
        self._num_clusters = 0

    def __enter__(self):
        self._start_cluster()
        self._start_run()
        return self

    def __exit__(self, *error):
        self._exit.close()

    def kill(self, chance):
        """Kill something that is there, and bring back what does not come back by itself; returns what it was."""
        everywhere = [each for node in self._cluster.nodes for each in node.processes()] + self.run.processes()
        titles = [described(each) for each in everywhere]
        here = [words for words in PROCESSES if any(words in title for title in titles)]
        victim = chance.choice([*here, DRIVER, NODE, EVERYTHING])
        if victim == NODE:
            self._further.kill()
            self._further = self._cluster.add(num_gpus=1)
        elif victim == DRIVER:
            self.run.process.kill()
            self.run.process.wait(60)
            self._start_run()
        elif victim == EVERYTHING:
            self.run.kill_all()
            self._exit.close()
            self._start_cluster()
            self._start_run()
        else:
            found = [each for each, title in zip(everywhere, titles, strict=True) if victim in title]
            with suppress(psutil.NoSuchProcess):
                chance.choice(found).kill()
        return victim

    def _start_cluster(self):
        self._num_clusters += 1
        self._cluster = self._exit.enter_context(LogicalCluster(self._folder / f"ray{self._num_clusters}"))
        self._cluster.add(num_gpus=2)
        self._further = self._cluster.add(num_gpus=1)

    def _start_run(self):
        self.run = Run.start(self._folder / "run", *self._arguments, RAY_ADDRESS=self._cluster.address)


@exhaustive
def test_updates_in_flight_interrupt_rollouts_that_go_on_as_if_nothing_had_happened(driver, grpo, tmp_path):
    in_flight = ("grpo.async_grpo.max_trajectory_age_steps=3", "grpo.async_grpo.in_flight_weight_updates=true")
    # one at a time and with no wait for a version: the first update finds completions of later steps unfinished, unless
    # the first step trains longer than it takes to generate two
    vllm = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.max_num_seqs=1")
    folder = tmp_path / "run"
    driver.train(folder, *grpo, "grpo.max_num_steps=3", *AHEAD, *LONG, *in_flight, *vllm)
    rollouts = rollouts_of(folder)
    for step, rows in rollouts.items():
        for row in rows:
            spans = row["weight_spans"]
            assert sum(span["end"] - span["start"] for span in spans) == row["num_sampled"]
            assert all(one["end"] == other["start"] for one, other in pairwise(spans))
            assert all(one["version"] < other["version"] for one, other in pairwise(spans))
            assert step - 3 <= spans[0]["version"] <= spans[-1]["version"] <= step
    interrupted = [row for rows in rollouts.values() for row in rows if len(row["weight_spans"]) > 1]
    assert interrupted
    steps = steps_of(folder)
    assert max(line["staleness/several_versions"] for line in steps) > 0
    # the trainer finds the logprobs that were sampled with, on both sides of every interruption
    assert max(line["mismatch/max"] for line in steps) < 1e-3
    proof = prove(RunFolder(folder))
    assert (proof.contradictions, proof.gaps) == ((), ())


@exhaustive
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_over_sampling_on_shared_devices_carries_rollouts_over_and_loses_no_prompt(grpo, tmp_path, backend):
    over_sampling = (
        *("grpo.over_sampling_ratio=1.5", "grpo.async_grpo.max_trajectory_age_steps=2"),
        *(f"policy.generation.backend={backend}", "loss_fn.importance.high=2.0"),
    )
    arguments = (*grpo, *LONG, *over_sampling, "grpo.max_num_steps=8", "checkpointing.save_period=2")
    run = Run.start(tmp_path / "run", *arguments)
    run.await_step(3)
    run.kill_one("ray::AsyncWorkerHost")
    run.await_step(5)
    run.kill_all()
    run = Run.start(tmp_path / "run", *arguments)
    run.finish()
    steps = steps_of(run.folder)
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert max(line["staleness/max"] for line in steps) <= 2
    assert max(line["staleness/several_versions"] for line in steps) > 0
    assert max(line["carried/share"] for line in steps) > 0
    assert max(line["mismatch/max"] for line in steps) < 1e-3
    # long rollouts train later
    carried = [line for line in steps if "carried/mean_length" in line and line["carried/share"] < 1]
    assert sum(line["carried/mean_length"] > line["carried/mean_length_of_others"] for line in carried) > 0
    prompts = [row["prompt_id"] for rows in rollouts_of(run.folder).values() for row in rows if row["index"] == 0]
    assert len(set(prompts)) == len(prompts) == NUM_PROMPTS * 8
    proof = prove(RunFolder(run.folder))
    assert (proof.contradictions, proof.gaps, proof.num_compared) == ((), (), 8)


@exhaustive
def test_replicas_join_and_leave_a_run_that_goes_on(grpo, tmp_path):
    # every version has the same weights, so that the policy finds the logprobs of every replica
    same = "policy.optimizer.kwargs.lr=0.0"
    arguments = (*grpo, *AHEAD, *ELASTIC, same, "grpo.max_num_steps=10000")
    with LogicalCluster(tmp_path / "ray") as cluster:
        cluster.add(num_gpus=2)
        run = Run.start(tmp_path / "run", *arguments, RAY_ADDRESS=cluster.address)
        run.await_step(1)
        further = cluster.add(num_gpus=1)
        await_replicas(run, 2)
        further.kill()
        await_replicas(run, 1)
        # the only replica dies: the run waits for another one
        cluster.kill_one("ray::AsyncWorkerHost")
        num_steps = len(steps_of(run.folder))
        run.await_step(num_steps + 3)
        run.process.send_signal(signal.SIGTERM)
        run.finish(code=UNFINISHED)
    steps = steps_of(run.folder)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert max(line["mismatch/max"] for line in steps) < 1e-3
    assert max(line["staleness/max"] for line in steps) == 1
    proof = prove(RunFolder(run.folder))
    assert (proof.contradictions, proof.gaps, proof.num_compared) == ((), (), len(steps))
    assert proof.num_trained == NUM_PROMPTS * len(steps)


def await_replicas(run, count, timeout=300):
    """Wait until a later step was made with so many replicas."""
    num_steps = len(steps_of(run.folder))
    deadline = time.monotonic() + timeout
    while not any(line["generation/replicas"] == count for line in steps_of(run.folder)[num_steps:]):
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, run.output
        time.sleep(0.1)
