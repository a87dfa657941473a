"""Runs that `rl submit slurm` gives to a Slurm cluster, and stand-ins for the programs of its jobs."""

import re
import signal
import sys
import time
from pathlib import Path

import psutil
from runs import described

from rl_launch.worker_envs.node_build import default_root

RL = Path(sys.executable).with_name("rl")

# Does what its attempt's word in `plan` says: finish, fail, wait (and save when it is told to end), or stall.
DRIVER = """#!/bin/bash
for word in "$@"; do [[ $word != run_dir=* ]] || run=${word#run_dir=}; done
echo "$*" >> "$run.drivers"
attempt=$(wc -l < "$run.drivers")
word=$(sed -n "${attempt}p" "$run.plan")
mkdir -p "$run/checkpoints"
save() { mkdir "$run/checkpoints/step_$attempt"; }
trap 'save; exit 75' TERM
case $word in
    finish) save; exit 0 ;;
    fail) exit 1 ;;
    stall) exit 75 ;;
    wait) while :; do sleep 0.2; done ;;
esac
"""
RAY = """#!/bin/bash
for word in "$@"; do [[ $word != --port=* ]] || port=${word#--port=}; done
echo "Ray runtime started."
[[ ! ${port:-} ]] || exec /usr/bin/python3 -c "import socket, sys, time
listener = socket.create_server(('', int(sys.argv[1])))
time.sleep(1000)" "$port"
exec sleep 1000
"""

# Programs that start containers, without the containers.
SRUN = """#!/bin/bash
for word in "$@"; do [[ $word == --container-* ]] || words+=("$word"); done
exec /usr/bin/srun "${words[@]}"
"""
APPTAINER = """#!/bin/bash
while [[ $1 != /images/* ]]; do shift; done
exec "${@:2}"
"""

STAND_INS = {"ray": RAY, "rl": DRIVER, "srun": SRUN, "apptainer": APPTAINER}


class Submitted:
    """A run that `rl submit slurm` has given to a cluster.

    Args:
        slurm: The cluster.
        folder: Folder for the run and what it needs.
        words: Recipe, and keys of the run and the profile.
        plan: What the stand-in for the driver does in each attempt; none for the real driver.
    """

    def __init__(self, slurm, folder, *words, plan=()):
        self.slurm, self.run, self._words = slurm, folder / "run", words
        home, fakes = folder / "home", folder / "fakes"
        for each in (home, fakes):
            each.mkdir(parents=True)
        self.variables = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/bin:/sbin",
            "RL_HOME": str(default_root().parent),
        }
        self._settings = ["slurm.local_folder=/run", "slurm.time_limit=01:00:00", f"run_dir={self.run}"]
        if plan:
            for name, text in STAND_INS.items():
                (fakes / name).write_text(text)
                (fakes / name).chmod(0o755)
            self._settings.append(f"slurm.setup=export PATH={fakes}:$PATH")
            (folder / "run.plan").write_text("".join(f"{word}\n" for word in plan))
        self.submit()

    def submit(self):
        """Submit it, for the first time or again."""
        answer = self.rl("slurm", *self._words, *self._settings)
        self.job = re.findall(r"^job (\d+)", answer, re.MULTILINE)[0]

    def rl(self, *words):
        """Output of `rl submit` on the first host."""
        return self.slurm.run(str(RL), "submit", *words, **self.variables)

    def shown(self, job=""):
        """Fields of the job as Slurm shows it."""
        return dict(
            re.findall(r"(\w+)=(\S*)", self.slurm.run("scontrol", "--oneliner", "show", "job", job or self.job))
        )

    def await_state(self, *states, job="", timeout=600):
        """Wait until the job is in one of these states, and return its fields."""
        return self.until(lambda: (found := self.shown(job))["JobState"] in states and found, states, timeout)

    def await_end(self, job=""):
        """Wait for the end of the job; returns its state and exit code."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        found = self.await_state(*ended, job=job)
        return f"{found['JobState']} {found['ExitCode']}"

    def await_driver(self, number, timeout=120):
        """Wait until the stand-in for the driver has started that many times."""
        self.until(lambda: len(self.drivers) >= number, f"driver {number}", timeout)

    def until(self, condition, awaited, timeout=120):
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{awaited}\n{self.output}\n{self.slurm.logs()}"
            time.sleep(0.2)
        return found

    @property
    def drivers(self):
        """Command lines of the drivers so far."""
        path = self.run.with_name("run.drivers")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def output(self):
        """Everything that the jobs have logged."""
        found = [*(self.run / "jobs").glob("*.log"), *(self.run / "jobs").glob("*/*.log")]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted(found))

    @property
    def attempts(self):
        """Names of the attempts' folders."""
        return sorted(path.name for path in (self.run / "jobs").iterdir() if path.is_dir())

    def processes(self):
        """Processes on all hosts that the job has started."""
        # jobs of another cluster on this machine may have the same number
        marks = {f"RL_JOB={self.job}", f"HOME={self.variables['HOME']}"}
        return [each for each in psutil.process_iter() if marks <= environment_of(each)]

    def stop_driver(self):
        """Let the stand-in for the driver save and end."""
        (driver,) = (each for each in self.processes() if "fakes/rl" in described(each))
        driver.send_signal(signal.SIGTERM)

    def assert_nothing_is_left(self):
        """Assert that neither processes nor files of the job are on any host."""
        self.until(lambda: not self.processes(), "processes of the job have ended")
        for host in self.slurm.living:
            assert "rl-" not in self.slurm.run("srun", f"--nodelist={host}", "ls", "/run", **self.variables)


def is_ray_of(process, host):
    """Whether a process is the stand-in for Ray on a host: the head on n1 listens, the other one on n2 sleeps."""
    words = described(process)
    return words == "sleep sleep 1000" if host == "n2" else "create_server" in words


def is_script_of(process, submitted):
    """Whether a process is the batch script of a run."""
    words = described(process).split()
    return len(words) == 3 and words[2].startswith(str(submitted.slurm.folder)) and words[2].endswith("slurm_script")


def environment_of(process):
    try:
        return set(Path(f"/proc/{process.pid}/environ").read_text().split("\0"))
    except OSError:
        return set()
