"""The batch script of docs/several-machines.md, run by a real Slurm on two hosts, which are namespaces."""

import re
import stat
import sys
import time
from pathlib import Path

import pytest
from runs import python_of, steps_of
from slurm_cluster import SlurmCluster, missing_requirement

from rl_core.plugins import POLICIES
from rl_core.testing.exhaustive import exhaustive
from rl_launch.worker_envs.node_build import default_root

PAGE = Path(__file__).parents[1] / "docs" / "several-machines.md"

pytestmark = [
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement() or "Slurm can run here"),
    pytest.mark.timeout(600),  # a batch job with its own Ray on two hosts, which share the cores of one machine
]


@pytest.fixture
def slurm(tmp_path):
    (tmp_path / "slurm").mkdir()
    with SlurmCluster(tmp_path / "slurm") as cluster:
        yield cluster


def batch_script(train: str) -> str:
    """The script as printed, for two small hosts without GPUs of Ray's own finding, with another run."""
    (script,) = re.findall(r"^```sh run\.sbatch check\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    sizes = "#SBATCH --nodes=2 --ntasks-per-node=1 --time=00:08:00"
    for pattern, replacement in (
        (r"^#SBATCH .*$", sizes),
        (r"\bray start ", "ray start --num-gpus=1 --num-cpus=4 --object-store-memory=100000000 "),
        (r"^rl train (?:.*\\\n)*.* &$", f"{train} &"),
    ):
        script, count = re.subn(pattern, replacement, script, flags=re.MULTILINE)
        assert count, pattern
    return script


def finished(slurm: SlurmCluster, script: str, folder: Path) -> tuple[str, str]:
    """The exit code that Slurm reports of a script, and its output."""
    path, output, home = folder / "run.sbatch", folder / "output", folder / "home"
    path.write_text(script)
    home.mkdir()
    variables = {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/bin:/sbin",
        "RAY_TMPDIR": "/run",
        "RL_HOME": str(default_root().parent),
    }
    job = slurm.run("sbatch", "--parsable", f"--output={output}", f"--chdir={folder}", str(path), **variables).strip()
    while True:
        shown = slurm.run("scontrol", "show", "job", job)
        (state,) = re.findall(r"JobState=(\S+)", shown)
        if state not in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}:
            break
        time.sleep(1)
    (code,) = re.findall(r" ExitCode=(\S+)", shown)
    return f"{state} {code}", output.read_text()


def test_the_printed_script_trains_over_two_hosts(slurm, tmp_path):
    run = tmp_path / "run"
    # the hosts reach nothing but each other
    python_of(POLICIES, "dtensor")
    train = (
        "rl train sft-arithmetic cluster.device=rehearsal cluster.num_nodes=2 cluster.gpus_per_node=1 "
        f"sft.max_num_steps=2 run_dir={run}"
    )
    state, output = finished(slurm, batch_script(train), tmp_path)
    assert state == "COMPLETED 0:0", f"{output}\n{slurm.logs()}"
    assert len(steps_of(run)) == 2
    token = tmp_path / "home" / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@exhaustive
def test_a_node_on_which_ray_does_not_start_fails_the_job(slurm, tmp_path):
    script = batch_script("rl train sft-arithmetic")
    broken, count = re.subn(r"(ray start .*)--address=", r"\1--no-such-option --address=", script)
    assert count == 1
    begun = time.monotonic()
    state, output = finished(slurm, broken, tmp_path)
    assert state == "FAILED 1:0", output
    assert "no-such-option" in output
    assert time.monotonic() - begun < 120
