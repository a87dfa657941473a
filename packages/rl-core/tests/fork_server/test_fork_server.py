"""Processes that a fork server starts are as those of `python`, and the server knows when not to start one."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core.fork_server import command
from rl_core.fork_server import server as server_module
from rl_core.fork_server.request import connected, send_request
from rl_core.fork_server.server import MAX_SERVERS, Server, listen

IDLE_S = 60.0


class Machine:
    """A folder of modules, whose imports are counted, and the servers of one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.modules = folder / "modules"
        self.modules.mkdir()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._imports = folder / "imports"
        self._imports.touch()

    def add(self, name: str, text: str = "") -> str:
        """Write a module that also notes each of its imports."""
        note = f"open({str(self._imports)!r}, 'a').write('{name}\\n')\n"
        (self.modules / f"{name}.py").write_text(note + text)
        return name

    @property
    def imports(self) -> list[str]:
        return self._imports.read_text().split()

    @property
    def sockets(self) -> list[Path]:
        return sorted(path for path in self.temporary.glob("*/*") if path.is_socket())

    def start(
        self, code: str, *modules: str, arguments: tuple[str, ...] = (), idle_s: float = IDLE_S, **variables: str
    ) -> subprocess.Popen[str]:
        """Start `python -c CODE ARGUMENTS` with modules imported."""
        return subprocess.Popen(
            [*command(sys.executable, modules, idle_s), "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(self.modules), "TMPDIR": str(self.temporary), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *modules: str, **settings: object) -> tuple[int, str, str]:
        """The status, the output and the errors of such a process."""
        process = self.start(code, *modules, **settings)  # type: ignore[arg-type]
        output, errors = process.communicate(timeout=60)
        return process.returncode, output.strip(), errors.strip()


@pytest.fixture
def machine() -> Iterator[Machine]:
    # the path of a socket may have 107 characters, and those of pytest are long
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield Machine(folder)
    # a server without its socket ends
    shutil.rmtree(folder)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_module_is_imported_once_for_many_processes(machine: Machine) -> None:
    module = machine.add("engine", "value = 3")
    code = "import engine, os; print(engine.value, os.getpid())"
    found = [machine.run(code, module) for _ in range(3)]
    assert [(status, output.split()[0]) for status, output, _ in found] == [(0, "3")] * 3
    assert len({output for _, output, _ in found}) == 3
    assert machine.imports == ["engine"]


def test_a_process_has_its_own_arguments_variables_folder_streams_and_mask(machine: Machine, tmp_path: Path) -> None:
    module = machine.add("engine")
    code = (
        "import os, sys; os.umask(mask := os.umask(0));"
        "print(sys.argv, os.environ['RAY_JOB'], os.getcwd(), oct(mask), sys.stdin.read(), sys.path[0] == '')"
    )
    machine.run("pass", module)
    old = os.umask(0o027)
    try:
        process = machine.start(code, module, arguments=("a", "b c"), RAY_JOB="7")
    finally:
        os.umask(old)
    output, _ = process.communicate("typed", timeout=60)
    assert output.strip() == f"['-c', 'a', 'b c'] 7 {os.getcwd()} 0o27 typed True"
    assert machine.imports == ["engine"]


def test_a_script_runs_as_main_with_its_folder_first(machine: Machine, tmp_path: Path) -> None:
    module = machine.add("engine")
    (tmp_path / "beside.py").write_text("value = 5")
    script = tmp_path / "script.py"
    script.write_text("import beside, sys\nprint(__name__, __file__, beside.value, sys.argv[1:])")
    done = subprocess.run(
        [*command(sys.executable, [module], IDLE_S), str(script), "x"],
        env={**os.environ, "PYTHONPATH": str(machine.modules), "TMPDIR": str(machine.temporary)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == f"__main__ {script} 5 ['x']"


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('enough')", 1, "enough"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_process_ends_as_it_would_by_itself(machine: Machine, code: str, status: int, error: str) -> None:
    found, _, errors = machine.run(code, machine.add("engine"))
    assert found == status
    assert error in errors


def test_signals_reach_the_process(machine: Machine) -> None:
    process = machine.start("import time; print('up', flush=True); time.sleep(60)", machine.add("engine"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_process_does_not_outlive_what_was_started(machine: Machine) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = machine.start(code, machine.add("engine"))
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.kill()
    until(lambda: not is_alive(pid))


def test_what_was_started_outlives_its_server(machine: Machine) -> None:
    code = "import os, time; print(os.getppid(), flush=True); input(); print('done')"
    process = machine.start(code, machine.add("engine"))
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    output, _ = process.communicate("\n", timeout=30)
    assert output == "done\n"


def test_a_server_that_dies_as_it_forks_has_started_the_process_once(machine: Machine) -> None:
    # a server forks first to count its own threads
    death = (
        "import os\nforks = []\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 9) if forks else forks.append(os.getpid()))"
    )
    module = machine.add("engine", death)
    _, output, _ = machine.run("import engine, time; time.sleep(0.5); print(len(engine.forks))", module)
    assert (output, machine.imports) == ("1", ["engine"])


def test_a_file_that_changed_is_imported_again(machine: Machine) -> None:
    module = machine.add("engine", "value = 1")
    code = "import engine; print(engine.value)"
    assert machine.run(code, module) == (0, "1", "")
    machine.add("engine", "value = 22")
    assert machine.run(code, module) == (0, "22", "")
    assert machine.run(code, module) == (0, "22", "")
    assert machine.imports == ["engine"] * 2


def test_a_package_that_was_installed_is_seen(machine: Machine) -> None:
    module = machine.add("engine", "import importlib.util\nhas_kernel = importlib.util.find_spec('kernel') is not None")
    code = "import engine; print(engine.has_kernel)"
    assert machine.run(code, module) == (0, "False", "")
    machine.add("kernel")
    assert machine.run(code, module) == (0, "True", "")


@pytest.mark.parametrize(
    ("variables", "is_shared"),
    [
        ({"TORCH_SETTING": "2"}, False),
        ({"OMP_NUM_THREADS": "3"}, False),
        ({"LD_LIBRARY_PATH": "/nowhere"}, False),
        ({"PYTHONHASHSEED": "7"}, False),
        ({"RAY_JOB_ID": "2", "PWD": "/", "PATH": "/bin", "PYTEST_CURRENT_TEST": "x"}, True),
        ({"RL_NODE_ADDRESS": "127.0.0.2", "GLOO_SOCKET_IFNAME": "lo", "SPT_NOENV": "1", "JPY_PARENT_PID": "7"}, True),
        ({"TMUX_PANE": "%7", "TERM": "xterm", "TERM_PROGRAM": "a", "WINDOWID": "7", "STY": "7", "COLUMNS": "99"}, True),
        ({"SSH_CONNECTION": "::1 1 ::1 22", "SSH_TTY": "/dev/pts/7", "XDG_SESSION_ID": "7", "DISPLAY": ":7"}, True),
        ({"VSCODE_IPC_HOOK_CLI": "/a", "DBUS_SESSION_BUS_ADDRESS": "a", "EDITOR": "a", "ANY_OTHER": "a"}, True),
    ],
)
def test_processes_share_a_server_if_their_libraries_would_import_alike(
    machine: Machine, variables: Mapping[str, str], is_shared: bool
) -> None:
    reads = "os.environ.copy(), shutil.get_terminal_size(), dict(os.environ), list(os.environ.items()), {**os.environ}"
    text = f"import os, shutil\nvalue, *_ = os.environ.get('TORCH_SETTING'), {reads}"
    module = machine.add("engine", text)
    code = f"import engine, os; print(engine.value, *(os.environ.get(name) for name in {list(variables)!r}))"
    assert machine.run(code, module)[0] == 0
    expected = " ".join([variables.get("TORCH_SETTING", "None"), *variables.values()])
    assert machine.run(code, module, **variables) == (0, expected, "")
    assert len(machine.sockets) == (1 if is_shared else 2)
    assert len(machine.imports) == (1 if is_shared else 2)


@pytest.mark.parametrize(
    "read", ["os.environ.get('{}')", "os.getenv('{}')", "'{0}' in os.environ and os.environ['{0}']"]
)
def test_a_variable_that_an_import_reads_starts_the_server_over(machine: Machine, read: str) -> None:
    # an import may set it, too
    text = "import os\nvalue = {}\nos.environ['MY_SETTING'] = 'set'".format(read.format("MY_SETTING"))
    module = machine.add("engine", text)
    code = "import engine; print(engine.value)"
    for value in ("1", "1", "2", "2"):
        assert machine.run(code, module, MY_SETTING=value) == (0, value, "")
    assert machine.imports == ["engine"] * 2
    assert len(machine.sockets) == 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path, list[float]]]:
    """A server in this process that stays for 600 seconds, its address, and its clock.

    It forks whatever other tests have imported and started in this process.
    """
    forkable = SimpleNamespace(refusal="", differs=lambda variables: False)
    monkeypatch.setattr(server_module, "Imported", lambda modules: forkable)
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    listener = listen(folder / "server")
    assert listener is not None
    now = [0.0]
    yield Server(listener, folder / "server", [], 600.0, clock=lambda: now[0]), folder / "server", now
    listener.close()
    shutil.rmtree(folder)


def test_a_server_that_others_only_look_for_ends_after_its_time(server: tuple[Server, Path, list[float]]) -> None:
    served, address, now = server
    for now[0] in (300.0, 599.0):
        assert listen(address) is None
        served.handle(0)
        assert address.exists()
    now[0] = 600.0
    assert listen(address) is None
    served.handle(0)
    assert not address.exists()


def test_a_process_gives_a_server_its_whole_time_again(
    server: tuple[Server, Path, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, address, now = server
    process = subprocess.Popen(["sleep", "60"])
    now[0] = 500.0
    with connected(address) as connection:  # type: ignore[union-attr]
        send_request(connection, ["-c", "pass"])
        monkeypatch.setattr(os, "fork", lambda: process.pid)
        served.handle(0)
        now[0] = 5000.0
        served.handle(0)
        assert address.exists()
        process.kill()
        served.handle(10)
    for now[0], stays in ((5599.0, True), (5600.0, False)):
        served.handle(0)
        assert address.exists() == stays


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        ("import ray", "imports ray"),
        ("raise ValueError('no engine here')", "no engine here"),
    ],
)
def test_a_module_that_cannot_be_shared_is_imported_by_each_process(machine: Machine, text: str, reason: str) -> None:
    (machine.modules / "ray.py").write_text("")
    module = machine.add("engine", text)
    for _ in range(2):
        status, output, errors = machine.run("import os; print('ran')", module)
        assert (status, output) == (0, "ran")
        assert errors.startswith("started without the fork server: ")
        assert reason in errors
    assert machine.imports == ["engine"]


def test_threads_of_blas_do_not_count(machine: Machine) -> None:
    module = machine.add("engine", "import numpy")
    code = "import numpy; a = numpy.ones((300, 300)); print((a @ a)[0, 0])"
    assert machine.run(code, module, OMP_NUM_THREADS="2") == (0, "300.0", "")


def test_processes_draw_other_numbers(machine: Machine) -> None:
    module = machine.add("engine", "import numpy, random")
    code = "import numpy, random; print(numpy.random.rand(), random.random())"
    drawn = [machine.run(code, module)[1].split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


def test_a_folder_that_others_enter_is_not_used(machine: Machine) -> None:
    folder = machine.temporary / f"rl-fork-server-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077
    assert machine.run("print('ran')", machine.add("engine")) == (0, "ran", "")
    assert machine.imports == []
    assert machine.sockets == []


def test_an_idle_server_ends(machine: Machine) -> None:
    _, output, _ = machine.run("import os; print(os.getppid())", machine.add("engine"), idle_s=0.1)
    until(lambda: not is_alive(int(output)))
    assert machine.sockets == []


def test_servers_are_few(machine: Machine) -> None:
    names = [machine.add(f"engine{index}") for index in range(MAX_SERVERS + 1)]
    servers = [int(machine.run("import os; print(os.getppid())", name)[1]) for name in names]
    assert len(machine.sockets) == MAX_SERVERS
    until(lambda: not is_alive(servers[0]))
    assert all(is_alive(server) for server in servers[1:])


def test_a_server_whose_address_another_took_leaves_it_alone(machine: Machine) -> None:
    module = machine.add("engine")
    code = "import os; print(os.getppid())"
    first = int(machine.run(code, module)[1])
    machine.sockets[0].unlink()
    second = int(machine.run(code, module)[1])
    assert second != first
    until(lambda: not is_alive(first))
    assert int(machine.run(code, module)[1]) == second


def test_a_socket_that_a_killed_server_left_is_replaced(machine: Machine) -> None:
    module = machine.add("engine")
    code = "import os; print(os.getppid())"
    server = int(machine.run(code, module)[1])
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_alive(server))
    status, output, _ = machine.run(code, module)
    assert status == 0
    assert int(output) != server
    assert len(machine.sockets) == 1


def test_without_modules_or_time_there_is_no_server() -> None:
    assert command("/python", []) == ["/python"]
    assert command("/python", ["torch"], 0) == ["/python"]
