"""`rl chaos` on real runs: faults on a schedule, and the proof that nothing was lost."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults import RAY_ENDED, REPLACED, RESTARTS
from runs import STARTED, Run, figures, steps_of

from rl_core.testing.exhaustive import exhaustive

SMALL = (
    "cluster.device=cpu",
    "checkpointing.save_period=2",
    "checkpointing.metric_name=null",
    "logger.tensorboard_enabled=false",
)
ROLLOUTS = (
    *("policy.generation.backend=hf", "grpo.val_period=0", "policy.train_global_batch_size=8"),
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
)
ASYNCHRONOUS = (
    *("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=1", "loss_fn.importance.high=2"),
    *("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"),
    "cluster.cpu_ranks_per_node=2",
)
RUNS = {
    "grpo": ("grpo-arithmetic", *ROLLOUTS, *SMALL, "cluster.cpu_ranks_per_node=1", "grpo.max_num_steps=20"),
    "asynchronous": ("grpo-arithmetic", *ROLLOUTS, *SMALL, *ASYNCHRONOUS, "grpo.max_num_steps=20"),
    "sft": (
        *("sft-arithmetic", *SMALL, "cluster.cpu_ranks_per_node=1", "sft.max_num_steps=20"),
        *("sft.val_period=0", "sft.stop_at_validation_loss=null"),
    ),
}
FAULTS = {
    "grpo": "rank,rollout-worker,environment,raylet,driver",
    "asynchronous": "rank,rollout-worker,environment,driver",
    "sft": "rank,raylet,keeper,driver",
}
SAYS = {"rank": RESTARTS, "rollout-worker": REPLACED, "raylet": RAY_ENDED, "keeper": RAY_ENDED}
"""Pattern of the warning in which the run names the cause of each fault; a driver that is killed can say nothing, and
the host of an environment is restarted within the deadline of a call."""


@exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_a_run_under_faults_on_a_schedule_loses_nothing_and_names_each_cause(name, rl, tmp_path):
    folder = tmp_path / "run"
    run = Run.start(folder, *RUNS[name])
    run.await_step(1)
    command = [str(Path(sys.executable).with_name("rl")), "chaos", str(folder), "--yes", "--resume"]
    times = ("--every", "0.2s", "--for", "60m", "--seed", "1", "--faults", FAULTS[name])
    with (tmp_path / "chaos.log").open("w") as log:
        done = subprocess.run([*command, *times], stdout=log, stderr=log, timeout=3600, check=False)
    output = (tmp_path / "chaos.log").read_text()
    assert done.returncode == 0, output
    run.process.wait(60)
    STARTED.clear()
    journal = [json.loads(line) for line in (folder / "chaos.jsonl").read_text().splitlines()]
    faults = {row["number"]: row["fault"] for row in journal if row["event"] == "fault"}
    said: dict[int, list[str]] = {number: [] for number in faults}
    for row in journal:
        if row["event"] == "message":
            said[row["number"]] += row["messages"]
    assert len(faults) >= 5
    assert set(faults.values()) == set(FAULTS[name].split(","))
    for number, fault in faults.items():
        # The last one may come as the run ends.
        if fault in SAYS and number < len(faults):
            assert re.search(SAYS[fault], "\n".join(said[number])), (number, fault, said)
    assert re.search("No (prompt|row) was lost or trained twice", output)
    proof = rl("doctor", "run", str(folder), "--json")
    assert json.loads(proof.output)["holds"]
    assert len(steps_of(folder)) == 20
    if name != "asynchronous":
        plain = rl("train", *RUNS[name], f"run_dir={tmp_path / 'plain'}")
        assert plain.code == 0, plain.output
        assert figures(folder) == figures(tmp_path / "plain")
