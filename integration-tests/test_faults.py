"""Faults that a run survives, bit for bit: dead workers, a verifier that hangs or crashes, a full disk, signals, and
the kill of all its processes.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tellable_environment
from faults import FAULT, FAULTS, LACKS, NONE, RAY_ENDED, RAYLET, RESTARTS, noticed
from logical_cluster import LogicalCluster
from runs import (
    NUM_PROMPTS,
    Run,
    assert_no_shared_memory_is_left,
    assert_same,
    described,
    figures,
    logs_of,
    rollouts_of,
    shared_memory,
    steps_of,
)

from rl_core.rollouts.record import turns_of
from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli.failure import UNFINISHED
from rl_launch.cluster.ray_nodes import state_of


def kill_and_resume(run, num_kills, steps, *arguments, **variables):
    """Kill all processes of a run a number of times, at random moments after a step between the first and the last
    given, and resume it each time; returns the last run.
    """
    seed = random.randrange(2**32)
    sys.stdout.write(f"kills were drawn with seed {seed}\n")
    chance = random.Random(seed)
    for step in sorted(chance.randint(*steps) for _ in range(num_kills)):
        run.await_step(step)
        time.sleep(chance.uniform(0, 1))
        _, alive = psutil.wait_procs(run.kill_all(), 30)
        assert not alive
        num_starts = run.num_starts
        run = Run.start(run.folder, *arguments, **variables)
        run.await_start(num_starts + 1, or_end=True)
        if run.process.poll() is not None:
            break  # it was killed after its last step
    return run


def tellable(orders, *, deadline_s):
    """Settings with which the environment that takes orders scores all prompts."""
    return (
        "data.train.env_name=tellable",
        "data.validation.env_name=tellable",
        f"env.tellable.orders={orders}",
        "env.tellable.answer_format=numeric",
        f"env.tellable.deadline_s={deadline_s}",
    )


def completions_of(folder, *, until):
    """Prompts and completions of these steps, in order."""
    return {
        step: [(row["prompt_id"], row["index"], [turn["text"] for turn in turns_of(row)]) for row in rows]
        for step, rows in rollouts_of(folder).items()
        if step <= until
    }


def prompts_of(folder):
    """Prompts of every step, in order."""
    return {step: list(dict.fromkeys(row["prompt_id"] for row in rows)) for step, rows in rollouts_of(folder).items()}


def test_an_sft_run_outlives_a_dead_rank_and_the_kill_of_all_it_started(num_kills, sft, whole_sft, tmp_path):
    before = shared_memory()
    run = Run.start(tmp_path / "run", *sft)
    run.await_step(10)
    run.kill_one("ray::WorkerHost")
    run.await_log("restarting from checkpoint step_")
    run.await_step(12)
    run.kill_one(RAYLET)
    run.finish(60, code=UNFINISHED)
    assert re.search(RAY_ENDED, run.output)
    assert json.loads((run.folder / "state.json").read_text())["status"] == "interrupted"
    num_starts = run.num_starts
    run = Run.start(run.folder, *sft)
    run.await_start(num_starts + 1)
    run = kill_and_resume(run, num_kills, (1, 29), *sft)
    assert_no_shared_memory_is_left(before)
    run.finish()
    assert figures(run.folder) == figures(whole_sft)
    assert logs_of(run.folder).count("restarting from") == 1
    assert_no_shared_memory_is_left(before)


@exhaustive
@pytest.mark.parametrize("generator", ["hf", "vllm"])
def test_a_grpo_run_outlives_the_death_of_everything_it_started(generator, num_kills, grpo, request, tmp_path):
    whole = request.getfixturevalue({"hf": "whole_hf", "vllm": "whole_grpo"}[generator])
    # all in one run, as every start of a run takes its engine's own time
    orders, before = tmp_path / "orders", shared_memory()
    orders.mkdir()
    told = (*grpo, f"policy.generation.backend={generator}", *tellable(orders, deadline_s=20))
    variables = {"PYTHONPATH": tellable_environment.install(tmp_path / "plugin")}

    run = Run.start(tmp_path / "run", *told, **variables)
    run.await_step(2)
    run.kill_one("environments.process")
    run.await_step(3)
    run.kill_one("ray::RestartingHost")
    run.await_step(4)
    run.kill_one("ray::AsyncWorkerHost")
    # before the kill of everything, which may follow at once
    run.await_log("replacing it", "was interrupted")
    run = kill_and_resume(run, num_kills, (4, 6), *told, **variables)

    # early enough that a step is left for the crash, whichever of the next two hangs
    run.await_step(7)
    (orders / "hang").touch()
    # a look at all processes takes as long as steps do, which wait now
    assert_no_shared_memory_is_left(before)
    run.await_log("no answer within its deadline of 20 s")
    (orders / "crash").touch()
    run.finish()

    rollouts = [(step, row) for step, rows in rollouts_of(run.folder).items() for row in rows]
    failed = [(step, row) for step, row in rollouts if row["status"] == "failed"]
    # the environment's process costs what it scores at its death, if it scores just then
    of_the_kill = {step for step, row in failed if "ended: signal SIGKILL" in row["failure"]}
    assert len(of_the_kill) <= 1
    undisturbed = failed[0][0] - 1
    assert of_the_kill or undisturbed >= 7
    assert figures(run.folder, until=undisturbed) == figures(whole, until=undisturbed)
    assert completions_of(run.folder, until=undisturbed) == completions_of(whole, until=undisturbed)
    prompts = prompts_of(run.folder)
    assert prompts == prompts_of(whole)
    assert len(set().union(*prompts.values())) == sum(len(each) for each in prompts.values()) == 12 * NUM_PROMPTS

    told_to_fail = [row for step, row in failed if step not in of_the_kill]
    assert len(told_to_fail) == 2
    reasons = "\n".join(row["failure"] for row in told_to_fail)
    assert "gave no answer within its deadline of 20 s" in reasons
    assert "ended: signal SIGABRT" in reasons
    assert {row["advantage"] for _, row in failed} == {0.0}

    log = logs_of(run.folder)
    assert log.count("replacing it") + log.count("was interrupted") == 1
    assert log.count("environment tellable: the process died and was started again") == 1
    assert len(re.findall("environment process restarts .*signal SIGKILL", log)) == 1
    for _, row in failed:
        place = f"arithmetic (train), row {row['prompt_id'].rpartition(':')[2]} (from 0)"
        assert log.count(f"rollout of {place} failed: {row['failure']}") == 1
    assert_no_shared_memory_is_left(before)


@exhaustive
def test_a_grpo_run_outlives_an_engine_that_dies_beside_its_replica(grpo, whole_grpo, tmp_path):
    orders, before = tmp_path / "orders", shared_memory()
    orders.mkdir()
    # the third step waits for the kill, and the engine has got weights twice by then
    (orders / "hold").write_text(prompts_of(whole_grpo)[3][0])
    told = (*grpo, *tellable(orders, deadline_s=840), "grpo.max_num_steps=4")
    variables = {"PYTHONPATH": tellable_environment.install(tmp_path / "plugin")}
    run = Run.start(tmp_path / "run", *told, "policy.generation.vllm_cfg.own_process=true", **variables)
    run.await_file(orders / "held")
    run.kill_one("VLLM::EngineCore")
    (orders / "hold").unlink()
    run.finish()
    assert figures(run.folder) == figures(whole_grpo, until=4)
    log = logs_of(run.folder)
    assert log.count("replacing it") + log.count("was interrupted") == 1
    assert_no_shared_memory_is_left(before)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for one checkpoint and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@exhaustive
@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_full_disk_ends_a_run_that_goes_on_once_there_is_room(sft, whole_sft, small_disk, async_save):
    run = Run.start(small_disk, *sft, f"checkpointing.async_save={async_save}")
    run.finish(code=1)
    _, _, report = run.output.rpartition("\nerror: ")
    assert report.startswith("no space left on a disk")
    assert f" {small_disk}. " in report
    assert "No space left on device" in report
    assert "Traceback" not in run.output
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_4"]
    again = Run.start(small_disk, *sft)
    again.finish(60, code=2)
    assert f"the disk of {small_disk} is full" in again.output
    subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)
    Run.start(small_disk, *sft).finish()
    assert figures(small_disk) == figures(whole_sft)


# rl-launch signals the process group of a session, and that of a driver whose Ray goes on
@exhaustive
def test_a_signal_to_all_of_a_run_saves_and_ends_it(driver, sft, whole_sft, tmp_path):
    run = Run.start(tmp_path / "run", *sft)
    run.await_step(10)
    found = run.processes()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(120, code=UNFINISHED)
    (saved,) = (run.folder / "checkpoints").glob("step_*")
    assert int(saved.name.removeprefix("step_")) == len(steps_of(run.folder)) < 30
    _, alive = psutil.wait_procs(found, 30)
    assert not alive
    driver.train(run.folder, *sft)
    assert figures(run.folder) == figures(whole_sft)


@pytest.fixture(scope="session")
def trained(once, sft, request):
    """Arguments of the runs that faults are done to, by kind, and a function from a kind to the undisturbed run."""
    few = ("cluster.device=cpu", "policy.generation.backend=hf", "grpo.val_period=0", "checkpointing.metric_name=null")
    bounds = ("policy.worker_timeout_s=30", "policy.generation.stall_timeout_s=20")
    # two updates a step
    small = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=8")
    saves = "checkpointing.save_period=3"
    arguments = {
        "sft": (*sft, "policy.worker_timeout_s=30"),
        "grpo": ("grpo-arithmetic", *few, *bounds, *small, saves, "grpo.max_num_steps=10", "env.math.deadline_s=10"),
        "agents": (
            "grpo-code-agent-tiny",
            *few,
            *bounds,
            *small,
            saves,
            "grpo.max_num_steps=8",
            "env.repository.deadline_s=10",
            "env.repository.sandbox.wall_s=30",
        ),
    }

    vllm = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.own_process=true")
    arguments["engines"] = (*arguments["grpo"], *vllm, "grpo.max_num_steps=8")

    def whole(kind):
        # a driver is started only to make one
        made = {"sft": sft}.get(kind, arguments[kind])
        name = {"sft": "whole-sft"}.get(kind, f"whole-fault-{kind}")
        return once(name, lambda folder: request.getfixturevalue("driver").train(folder, *made))

    return arguments, whole


def assert_ended(processes, timeout=60):
    """Assert that processes end, collected by whoever inherits them or not."""
    deadline = time.monotonic() + timeout
    while alive := [each for each in processes if state_of(each) != psutil.STATUS_DEAD]:
        assert time.monotonic() < deadline, [(each.pid, state_of(each), described(each)) for each in alive]
        time.sleep(0.2)


def noticed_in(seconds, message):
    """Return the time until a run named a fault, in words; empty if there was nothing to name."""
    return f"{seconds:.1f} s" if message else ""


def proof_of(rl, folder, expected, *, is_exact):
    """Assert that a run has trained what an undisturbed one has; returns it in words."""
    steps = figures(expected)
    assert figures(folder).keys() == steps.keys()
    assert figures(folder) == steps or not is_exact
    equal = f"{len(steps)} of {len(steps)} steps equal" if is_exact else f"{len(steps)} steps"
    if not rollouts_of(folder):
        return equal
    proof = rl("doctor", "run", str(folder), "--json")
    assert proof.code == 0, proof.output
    return f"{equal}, {json.loads(proof.output)['num_trained']} prompts trained once"


@exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_run_outlives_a_fault_of_each_of_its_processes(fault, trained, rl, record_property, tmp_path):
    arguments, whole = trained
    expected = whole(fault.run)
    seed = random.randrange(2**32)
    sys.stdout.write(f"the fault was drawn with seed {seed}\n")
    chance = random.Random(seed)
    run = Run.start(tmp_path / "run", *arguments[fault.run])
    run.await_step(step := chance.randint(1, len(steps_of(expected)) // 2))
    time.sleep(chance.uniform(0, 0.3))
    with run.paused():
        before = run.processes()
    fault.strike(run)
    seconds, message = noticed(run, fault.says)
    code = run.process.wait(600)
    assert code == fault.code, run.output
    assert bool(message) == (fault.says != NONE), run.output
    assert_ended(before)
    if code:
        # one that is killed can write nothing
        assert json.loads((run.folder / "state.json").read_text())["status"] in ("running", "interrupted")
        Run.start(run.folder, *arguments[fault.run]).finish()
    proof = proof_of(rl, run.folder, expected, is_exact=fault.is_exact)
    record_property(FAULT, [str(fault), str(step), noticed_in(seconds, message), message.strip(), str(code), proof])


@exhaustive
@pytest.mark.parametrize("lack", LACKS, ids=str)
def test_a_run_outlives_a_machine_that_lacks_or_refuses_something(lack, trained, rl, record_property, tmp_path):
    arguments, whole = trained
    expected = whole(lack.run)
    run = Run.start(tmp_path / "run", *arguments[lack.run], prefix=lack.machine(tmp_path / "run"))
    if lack.begins:
        run.await_step(5)
        (tmp_path / "broken").touch()
    seconds, message = noticed(run, lack.says)
    code = run.process.wait(600)
    assert code == lack.code, run.output
    assert bool(message) == (lack.says != NONE), run.output
    assert "Traceback" not in run.output
    (tmp_path / "broken").unlink(missing_ok=True)
    if code:
        Run.start(run.folder, *arguments[lack.run]).finish()
    proof = proof_of(rl, run.folder, expected, is_exact=True)
    step = "5" if lack.begins else ""
    record_property(FAULT, [str(lack), step, noticed_in(seconds, message), message.strip(), str(code), proof])


@pytest.fixture
def own_network():
    """Words that start a program in a network of its own, in which all addresses are those of the machine."""
    name = f"rl-fault-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network can be made here: {made.stderr.strip()}")
    within = ("ip", "netns", "exec", name)
    subprocess.run([*within, "ip", "link", "set", "lo", "up"], check=True)
    yield within
    subprocess.run(["ip", "netns", "delete", name], check=True)


@exhaustive
def test_a_run_outlives_a_node_that_is_cut_off_and_lives_on(sft, trained, own_network, record_property, tmp_path):
    expected = trained[1]("sft")
    with LogicalCluster(tmp_path / "ray", own_network) as cluster:
        cluster.add(num_gpus=0)
        for _ in range(3):
            cluster.add(num_gpus=1)
        nodes = ("cluster.device=rehearsal", "cluster.num_nodes=2", "cluster.gpus_per_node=1")
        arguments = (*sft, *nodes, "policy.worker_timeout_s=60")
        run = Run.start(tmp_path / "run", *arguments, prefix=own_network, RAY_ADDRESS=cluster.address)
        run.await_step(5)
        with run.paused():
            cut = next(node for node in cluster.nodes[1:] if node.runs("ray::WorkerHost"))
            # what is sent to it is lost without an answer
            route = ("ip", "route", "add", "blackhole", cut.address, "table", "local")
            subprocess.run([*own_network, *route], check=True)
        seconds, message = noticed(run, RESTARTS)
        run.finish()
        assert cut.address in message, run.output
    assert_same(steps_of(run.folder), steps_of(expected), ("train/loss", "train/grad_norm"), 1e-3)
    row = ["sft, a node that is cut off", "5", f"{seconds:.1f} s", message.strip(), "0", "30 steps equal to 1e-3"]
    record_property(FAULT, row)


@exhaustive
def test_a_second_driver_of_a_run_is_refused_and_the_first_goes_on(trained, record_property, tmp_path):
    arguments, whole = trained
    expected = whole("sft")
    run = Run.start(tmp_path / "run", *arguments["sft"])
    run.await_step(3)
    began = time.monotonic()
    refused = subprocess.run(run.process.args, capture_output=True, text=True, timeout=120, check=False)
    seconds = time.monotonic() - began
    assert refused.returncode == 2
    assert "is in use by process" in refused.stderr
    run.finish()
    assert figures(run.folder) == figures(expected)
    row = ["sft, two drivers on one run", "3", f"{seconds:.1f} s", refused.stderr.strip().splitlines()[-1], "2, 0"]
    record_property(FAULT, [*row, "30 of 30 steps equal"])
