"""`rl chaos` on a real run: faults on a schedule, and the proof that nothing was lost."""

import json
import re
import subprocess
import sys
from pathlib import Path

from faults import RAY_ENDED, RESTARTS
from runs import STARTED, Run, figures, steps_of

from rl_core.testing.exhaustive import exhaustive

SETTINGS = (
    *("sft-arithmetic", "cluster.device=cpu", "cluster.cpu_ranks_per_node=1", "logger.tensorboard_enabled=false"),
    *("checkpointing.save_period=2", "checkpointing.metric_name=null", "sft.max_num_steps=20", "sft.val_period=0"),
    "sft.stop_at_validation_loss=null",
)
SAYS = {"rank": RESTARTS, "raylet": RAY_ENDED, "keeper": RAY_ENDED, "driver": ""}
"""Pattern of the warning in which the run names the cause of each fault. A driver that is killed can say nothing."""


@exhaustive
def test_a_run_under_faults_on_a_schedule_loses_nothing_and_names_each_cause(rl, tmp_path):
    folder = tmp_path / "run"
    run = Run.start(folder, *SETTINGS)
    run.await_step(1)
    command = [str(Path(sys.executable).with_name("rl")), "chaos", str(folder), "--yes", "--resume"]
    times = ("--every", "0.2s", "--for", "60m", "--seed", "1", "--faults", ",".join(SAYS))
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
    assert set(faults.values()) == set(SAYS)
    for number, fault in faults.items():
        # The last one may come as the run ends.
        if number < len(faults):
            assert re.search(SAYS[fault], "\n".join(said[number])), (number, fault, said)
    assert "No row was lost or trained twice" in output
    proof = rl("doctor", "run", str(folder), "--json")
    assert json.loads(proof.output)["holds"]
    assert len(steps_of(folder)) == 20
    plain = rl("train", *SETTINGS, f"run_dir={tmp_path / 'plain'}")
    assert plain.code == 0, plain.output
    assert figures(folder) == figures(tmp_path / "plain")
