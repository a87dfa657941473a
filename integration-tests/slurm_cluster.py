"""A Slurm cluster on this machine: each host has a network, host name, processes, /run and /dev/shm of its own.

Everything lives in namespaces below one process, so that nothing is left on the machine when that process is killed.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")

_CONF = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
MailProg=/bin/true
NodeName={nodes} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{further}
"""

# inside namespaces that hide the machine's network, mounts and processes
_NETWORK = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
number=0
for host in $HOSTS; do
    number=$((number + 1))
    ip netns add "$host"
    ip link add "to-$host" type veth peer name eth0 netns "$host"
    ip link set "to-$host" master bridge up
    ip -n "$host" addr add "10.0.0.$number/24" dev eth0
    ip -n "$host" link set eth0 up
    ip -n "$host" link set lo up
done
munged --force --key-file="$FOLDER/munge.key" --socket="$FOLDER/munge.socket" --pid-file="$FOLDER/munged.pid" \\
    --seed-file="$FOLDER/munge.seed" --log-file="$FOLDER/munged.log"
for host in $HOSTS; do
    ip netns exec "$host" unshare --uts --mount --pid --ipc --fork --kill-child --mount-proc \\
        bash -c "$START_HOST" "$host" &
done
wait
"""

_HOST = """
set -e
hostname "$0"
mount --bind "$FOLDER/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size=256m tmpfs /dev/shm
[ "$0" != "${HOSTS%% *}" ] || slurmctld -D &
slurmd -D -N "$0" &
echo > "$FOLDER/started.$0"
wait
"""


def missing_requirement() -> str:
    """Return why no Slurm cluster can be started here; empty if one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge, iproute2)"
    return "" if os.geteuid() == 0 else "needs root"


class SlurmCluster:
    """Slurm with `hosts` as its nodes; the first is also the controller.

    Args:
        folder: Folder for its configuration, state and logs.
        hosts: Names of the hosts.
        further: Further lines of slurm.conf.
    """

    def __init__(self, folder: Path, hosts: tuple[str, ...] = ("n1", "n2"), further: str = "") -> None:
        self.folder, self.hosts, self._further = folder, hosts, further
        self.living = list(hosts)

    def __enter__(self) -> "SlurmCluster":
        for name in ("state", *(f"spool.{host}" for host in self.hosts)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "slurm.conf").write_text(
            _CONF.format(folder=self.folder, first=self.hosts[0], nodes=",".join(self.hosts), further=self._further)
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        addresses = [f"10.0.0.{number} {host}" for number, host in enumerate(self.hosts, 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        settings = {"FOLDER": str(self.folder), "HOSTS": " ".join(self.hosts), "START_HOST": _HOST}
        settings["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._environment = {**os.environ, **settings}
        with (self.folder / "output.log").open("w") as output:
            self._process = subprocess.Popen(
                [
                    "unshare",
                    "--net",
                    "--mount",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    "bash",
                    "-c",
                    _NETWORK,
                ],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            self._await_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # the kernel ends every process of the namespace with its first one, which `--kill-child` ends
        self._process.kill()
        self._process.wait()

    def run(self, *command: str, **variables: str) -> str:
        """Run a command on the first host, and return its output.

        Raises:
            AssertionError: If it fails.
        """
        done = subprocess.run(
            ["nsenter", "--all", f"--target={self._first_host()}", *command],
            env={**self._environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def kill(self, host: str) -> None:
        """Kill a host with everything on it, as a power failure would."""
        self.living.remove(host)
        # the kernel ends the processes of a host with the first one, which `--kill-child` ends
        os.kill(self._find(lambda words: words[0] == "unshare" and words[-1] == host), signal.SIGKILL)

    def logs(self) -> str:
        """Return everything that Slurm has logged."""
        found = [f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(found)

    def _await_nodes(self, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        states: list[str] = []
        while states != ["idle"] * len(self.hosts):
            assert self._process.poll() is None, self.logs()
            assert time.monotonic() < deadline, f"{states}\n{self.logs()}"
            time.sleep(0.3)
            if all((self.folder / f"started.{host}").exists() for host in self.hosts):
                try:
                    states = self.run("sinfo", "--noheader", "--Node", "--partition=all", "--format=%t").split()
                except AssertionError as error:  # the controller does not answer yet
                    states = [str(error)]

    def _first_host(self) -> int:
        """Return the id of a process in all namespaces of the first host."""
        return self._find(lambda words: words == ["slurmctld", "-D"])

    def _find(self, is_wanted: Callable[[list[str]], bool]) -> int:
        """Return the id of a process of this cluster by the words of its command."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_text().split("\0")[:-1]
                environment = (entry / "environ").read_text().split("\0")
            except OSError:
                continue
            if words and is_wanted(words) and f"FOLDER={self.folder}" in environment:
                return int(entry.name)
        raise AssertionError(f"no such process\n{self.logs()}")
