"""Programs end alike on a server, in containers and on services; a service that fails costs one rollout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult, UnusableAnswer
from rl_core.testing.exhaustive import exhaustive
from rl_envs.code.environment import CodeEnvironment, check_row
from rl_envs.code.plugin import CodeConfig
from rl_envs.sandbox import machines
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.conformance import CHECKS, differences
from rl_envs.sandbox.containers import Containers, Docker
from rl_envs.sandbox.machines import MachineRequest, ServiceSandbox, job_of, read_report
from rl_envs.sandbox.program import Cancellation, Limits, Outcome, Program
from rl_envs.sandbox.relay import Relay
from rl_envs.sandbox.remote import RemoteSandbox
from rl_envs.sandbox.runner import Runner, SandboxFailed, SandboxUnavailable
from rl_envs.sandbox.sandbox import Sandbox, machine_problem, open_sandbox
from rl_envs.sandbox.server import SandboxServer

QUICK = ("a large binary input", "binary output", "the limit of memory", "an end by a file")
"""Checks of every run; the others need time."""
LIMITS = Limits(cpu_s=20.0, wall_s=60.0)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` that runs containers as processes; its log."""
    script = (Path(__file__).parent / "scripted_engine.py").read_text()
    (tmp_path / "docker").write_text(f"#!{sys.executable} -S\n{script}")
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "log"


class Folder:
    """A machine of a service that has files and a shell: a folder that stands for `/tmp`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_closed = 0

    def write(self, path: str, data: bytes) -> None:
        (self.root / Path(path).name).write_bytes(data)

    def read(self, path: str, **_: str) -> bytearray:
        return bytearray((self.root / Path(path).name).read_bytes())

    def execute(self, command: str) -> int:
        return subprocess.run(["sh", "-c", command.replace("/tmp/", f"{self.root}/")], check=False).returncode

    def close(self) -> None:
        self.num_closed += 1


class CommandExitException(Exception):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


def _folders(root: Path) -> Callable[[], Folder]:
    return lambda: Folder(Path(tempfile.mkdtemp(dir=root)))


def _e2b(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module with the names of the package that `rl_envs.sandbox.e2b` uses."""
    new = _folders(root)

    def create(template: str | None = None, *, timeout: int, allow_internet_access: bool) -> Any:
        assert (template, allow_internet_access) == ("a-template", False)
        folder = new()

        def run(command: str, timeout: float) -> Any:
            if code := folder.execute(command):
                raise CommandExitException(code)
            return SimpleNamespace(exit_code=0)

        return SimpleNamespace(files=folder, commands=SimpleNamespace(run=run), kill=folder.close)

    module = SimpleNamespace(Sandbox=SimpleNamespace(create=create), CommandExitException=CommandExitException)
    monkeypatch.setitem(sys.modules, "e2b", module)
    monkeypatch.setenv("E2B_API_KEY", "a key")


def _modal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module with the names of the package that `rl_envs.sandbox.modal` uses."""
    new = _folders(root)

    def create(*command: str, app: str, image: str, timeout: int, memory: tuple[int, int], block_network: bool) -> Any:
        assert (app, image, block_network) == ("rl-sandboxes", "a-template", True)
        folder = new()

        def execute(*command: str, timeout: int) -> Any:
            code = folder.execute(command[-1])
            return SimpleNamespace(wait=lambda: code)

        files = SimpleNamespace(write_bytes=lambda data, path: folder.write(path, data), read_bytes=folder.read)
        return SimpleNamespace(filesystem=files, exec=execute, terminate=folder.close)

    module = SimpleNamespace(
        App=SimpleNamespace(lookup=lambda name, create_if_missing: name),
        Image=SimpleNamespace(from_registry=lambda tag: tag),
        Sandbox=SimpleNamespace(create=create),
    )
    monkeypatch.setitem(sys.modules, "modal", module)


@pytest.fixture(scope="module")
def roomy() -> Iterator[SandboxServer]:
    """A server that really runs programs, in the sandbox of this machine."""
    with Sandbox("limits", limits=Limits(cpu_s=60.0, wall_s=120.0, scratch_mib=64, processes=64)) as sandbox:
        server = SandboxServer(sandbox)
        with server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server
            server.shutdown()
            thread.join()


@pytest.fixture(params=["sandbox", "url", "docker", "e2b", "modal", "file"])
def runner(
    request: pytest.FixtureRequest, roomy: SandboxServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Path
) -> Iterator[Runner]:
    match request.param:
        case "sandbox":
            try:
                opened: Runner = Sandbox("namespaces")
            except SandboxUnavailable as error:
                pytest.skip(str(error))
        case "url":
            opened = open_sandbox(SandboxConfig(url=roomy.url))
        case "file":
            (tmp_path / "mine.py").write_text(OWN_SERVICE)
            opened = open_sandbox(SandboxConfig(service=f"{tmp_path}/mine.py:Mine"))
        case name:
            {"e2b": _e2b, "modal": _modal, "docker": lambda *_: None}[name](tmp_path, monkeypatch)
            opened = open_sandbox(SandboxConfig(service=name, image="a-template"))
    yield opened
    opened.close()


OWN_SERVICE = """
import subprocess, sys, tempfile

class Mine:
    def open(self, request):
        return tempfile.TemporaryDirectory()

    def run(self, machine, supervisor, job, timeout_s):
        command = [sys.executable, "-c", supervisor, "-", "-"]
        process = subprocess.Popen(command, cwd=machine.name, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process:
            process.stdin.write(job)
            process.stdin.flush()
            return process.stdout.read()

    def close(self, machine):
        machine.cleanup()
"""


def test_programs_end_alike_everywhere(runner: Runner) -> None:
    assert list(differences(runner, [each for each in CHECKS if each.name in QUICK])) == []


@exhaustive
def test_all_programs_end_alike_everywhere(runner: Runner) -> None:
    assert list(differences(runner)) == []


def test_a_container_has_no_network_and_limits_and_is_removed(engine: Path) -> None:
    docker = open_sandbox(SandboxConfig(service="docker", image="an-image", memory_mib=300, scratch_mib=10))
    outcome = docker.run(Program("import os; print(os.environ['OF_IMAGE'])", image="image-of-the-row"))
    assert outcome.stdout == b"image-of-the-row\n"
    [command] = [each for each in map(json.loads, engine.read_text().splitlines()) if each[0] == "run"]
    text = " ".join(command)
    for part in (
        *("--rm", "--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges"),
        *("--memory 374m --memory-swap 374m", "--pids-limit 24", "--tmpfs /scratch:rw,exec,nosuid,nodev,size=10m"),
    ):
        assert part in text


HOSTILE_IMAGES = {
    "engine-fails": "the daemon is away",
    "without-python": "needs python3",
    "huge": "sent more than",
    "garbage": "malformed report",
    "missing-image": "does not exist",
}


@pytest.mark.parametrize(("image", "reason"), HOSTILE_IMAGES.items(), ids=HOSTILE_IMAGES)
def test_a_container_that_fails_is_a_failure_of_the_infrastructure(image: str, reason: str, engine: Path) -> None:
    docker = ServiceSandbox(Docker(), image=image, limits=Limits(output_kib=1, scratch_mib=1))
    with pytest.raises(SandboxFailed, match=reason):
        docker.run(Program("print(1)"))


def test_a_container_that_the_kernel_ends_has_used_too_much_memory(engine: Path) -> None:
    assert ServiceSandbox(Docker(), image="out-of-memory").run(Program("")).ending == "memory"


def test_a_container_that_does_not_report_is_ended(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MARGIN_S", 0.2)
    with pytest.raises(SandboxFailed, match="could not run a container"):
        ServiceSandbox(Docker(), image="silent", limits=Limits(wall_s=0.1)).run(Program(""))


def test_a_cancelled_program_ends_at_once(engine: Path) -> None:
    docker, cancellation = ServiceSandbox(Docker(), image="i"), Cancellation()
    timer = threading.Timer(1.0, cancellation.cancel)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(SandboxFailed, match="was cancelled"):
        docker.run(Program("import time; time.sleep(60)"), LIMITS, cancellation)
    assert time.monotonic() - begin < 20
    with pytest.raises(SandboxFailed, match="was cancelled"):
        docker.run(Program("print(1)"), LIMITS, cancellation)


def test_a_container_ends_with_the_process_that_started_it(engine: Path) -> None:
    code = (
        "from rl_envs.sandbox.sandbox import *\n"
        "open_sandbox(SandboxConfig(service='docker', image='i')).run(\n"
        '    Program(\'import time; open("begun", "w").close(); time.sleep(60)\'), Limits(wall_s=60))'
    )
    process = subprocess.Popen([sys.executable, "-c", f"from rl_envs.sandbox.program import Limits\n{code}"])
    until = time.monotonic() + 60
    while not (begun := list(engine.parent.glob("*/begun"))) and time.monotonic() < until:
        time.sleep(0.05)
    assert begun
    [name] = engine.parent.glob("rl-sandbox-*")
    process.send_signal(signal.SIGKILL)
    process.wait()
    stat = Path(f"/proc/{name.read_text()}")
    while stat.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not stat.exists()


def test_a_program_in_a_container_reaches_its_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The scripted engine has no mounts, so the supervisor finds the socket under its name outside.
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        outside, inside = server.server_address[1], _free_port()
        docker = Containers("true")
        docker._images.add("i")
        machine = docker.open(MachineRequest("i", LIMITS, relay=Relay("127.0.0.1", outside)))
        folder = machine.mounts[-1].partition(":")[0]
        monkeypatch.setattr(machines, "RELAY_SOCKET", f"{folder}/socket")
        source = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{inside}', b'abc').read())"
        (tmp_path / "mine.py").write_text(OWN_SERVICE)
        try:
            mine = open_sandbox(SandboxConfig(service=f"{tmp_path}/mine.py:Mine"))
            assert mine.run(Program(source, relay=Relay("127.0.0.1", inside))).stdout == b"b'cba'\n"
        finally:
            docker.close(machine)
            server.shutdown()
            thread.join()
        assert not Path(folder).exists()


class Echo(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, *_: object) -> None:
        pass


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as port:
        found: int = port.getsockname()[1]
        return found


def test_a_service_that_is_not_there_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = machine_problem(SandboxConfig(service="podman", image="i"))
    assert "podman is not installed on this machine. Install it" in problem
    (tmp_path / "podman").write_text("#!/bin/sh\necho no daemon >&2\nexit 1")
    (tmp_path / "podman").chmod(0o755)
    assert "no daemon" in machine_problem(SandboxConfig(service="podman", image="i"))
    monkeypatch.setitem(sys.modules, "e2b", None)
    assert "pip install e2b" in machine_problem(SandboxConfig(service="e2b"))
    monkeypatch.setitem(sys.modules, "e2b", SimpleNamespace())
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    assert "E2B_API_KEY" in machine_problem(SandboxConfig(service="e2b"))


class Bad:
    """A service that fails in one way."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.closed: list[Any] = []
        self._methods = methods

    def open(self, request: MachineRequest) -> Any:
        return self._methods.get("open", lambda: "machine")()

    def run(self, machine: Any, supervisor: str, job: bytes, timeout_s: float) -> Any:
        return self._methods.get("run", lambda: b"")()

    def close(self, machine: Any) -> None:
        self.closed.append(machine)
        self._methods.get("close", lambda: None)()


def _raise(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


BAD = {
    "no quota": (Bad(open=_raise(RuntimeError("no quota"))), "RuntimeError: no quota", 0),
    "an end": (Bad(open=_raise(SystemExit("the end"))), "SystemExit: the end", 0),
    "a lost connection": (Bad(run=_raise(ConnectionError("lost"))), "ConnectionError: lost", 1),
    "nothing": (Bad(run=lambda: None), "malformed report", 1),
    "words": (Bad(run=lambda: "all is well"), "malformed report", 1),
    "an end that fails too": (Bad(run=lambda: b"x", close=_raise(OSError("gone"))), "malformed report", 1),
    "a long reason": (Bad(run=_raise(ValueError("x" * 10**6))), "ValueError: x", 1),
}


@pytest.mark.parametrize(("service", "reason", "num_closed"), BAD.values(), ids=BAD)
def test_a_service_that_fails_costs_its_program(service: Bad, reason: str, num_closed: int) -> None:
    with pytest.raises(SandboxFailed, match=reason) as raised:
        ServiceSandbox(service).run(Program("print(1)"))
    assert len(str(raised.value)) < 1000
    assert len(service.closed) == num_closed


def test_a_service_that_hangs_is_left_and_its_late_machine_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "GRACE_S", 0.1)
    late = threading.Event()
    service = Bad(open=lambda: late.wait(30) and "late machine")
    with pytest.raises(SandboxFailed, match="has not answered"):
        ServiceSandbox(service, limits=Limits(wall_s=0.1)).run(Program(""))
    late.set()
    until = time.monotonic() + 10
    while service.closed != ["late machine"] and time.monotonic() < until:
        time.sleep(0.01)
    assert service.closed == ["late machine"]


def _report(**changes: Any) -> bytes:
    report = {
        "ending": "exit",
        "exit_code": 0,
        "signal": None,
        "seconds": 0.1,
        "is_complete": False,
        "snapshot_problem": "",
        "parts": [2, 1, 0],
        **changes,
    }
    encoded = json.dumps(report).encode()
    return b"ab!" + encoded + len(encoded).to_bytes(8, "big")


def test_a_report_is_read_within_the_limits() -> None:
    assert read_report(_report(), Limits()) == Outcome("exit", 0, None, b"ab", b"!", 0.1)


LIES: Mapping[str, Any] = {
    "lengths beyond it": {"parts": [2, 1, 10**12]},
    "negative lengths": {"parts": [5, -2, 0]},
    "two lengths": {"parts": [2, 1]},
    "lengths in words": {"parts": "abc"},
    "another ending": {"ending": "success"},
    "an ending that is a list": {"ending": []},
    "a code beyond": {"exit_code": 256},
    "a code that is true": {"exit_code": True},
    "a code of a signal": {"ending": "signal", "signal": 9},
    "no signal": {"ending": "signal", "exit_code": None},
    "a time that is none": {"seconds": float("nan")},
    "completeness in words": {"is_complete": "yes"},
    "a problem that is a list": {"snapshot_problem": []},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_report_that_lies_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(SandboxFailed, match="malformed report"):
        read_report(_report(**lie), Limits())


NO_REPORTS = (b"", b"x", b"\xff" * 64, bytes(64), (2**40).to_bytes(8, "big"), b"[" * 10**5 + (10**5).to_bytes(8, "big"))


@pytest.mark.parametrize("data", NO_REPORTS, ids=range(len(NO_REPORTS)))
def test_bytes_that_are_no_report_are_refused(data: bytes) -> None:
    with pytest.raises(SandboxFailed, match="malformed report"):
        read_report(data, Limits())


class Server(BaseHTTPRequestHandler):
    """Answers as its class says, and counts."""

    answers: list[Callable[[Server], None]]
    keys: list[str | None]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Authorization"])
        (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(self)

    def do_GET(self) -> None:
        self.keys.append("followed")

    def log_message(self, *_: object) -> None:
        pass

    def say(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def flood(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 2**20)
        except OSError:
            pass

    def drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(200):
                self.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            pass


def _answered(*answers: Callable[[Server], None]) -> tuple[ThreadingHTTPServer, type[Server]]:
    handler = type("Handler", (Server,), {"answers": list(answers), "keys": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, handler


GOOD = json.dumps({"status": "Success", "run_result": {"return_code": 0, "stdout": "42\n"}}).encode()
HOSTILE: Mapping[str, tuple[Callable[[Server], None], str]] = {
    "huge": (Server.flood, "sent more than"),
    "slow": (Server.drip, "time limit|timed out|has not answered"),
    "HTML": (lambda s: s.say(200, b"<html>"), "did not answer"),
    "deep nesting": (lambda s: s.say(200, b"[" * 10**5), "did not answer"),
    "an error": (lambda s: s.say(500), "HTTP 500"),
    "elsewhere": (lambda s: s.say(302, Location="/elsewhere"), "HTTP 302"),
    "a closed connection": (lambda s: s.connection.close(), "did not answer"),
    "a report that is not base64": (
        lambda s: s.say(200, json.dumps({**json.loads(GOOD), "files": {"rl_report": "?"}}).encode()),
        "malformed answer",
    ),
    "files that are a list": (
        lambda s: s.say(200, json.dumps({**json.loads(GOOD), "files": ["rl_report"]}).encode()),
        "malformed answer",
    ),
    "no quota": (lambda s: s.say(200, b'{"status": "SandboxError", "message": "no quota"}'), "no quota"),
}


@pytest.mark.parametrize(("answer", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_server_costs_its_program(
    answer: Callable[[Server], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "MARGIN_S", 0.5)
    monkeypatch.setenv("A_KEY", "a secret")
    server, handler = _answered(answer)
    with server:
        remote = RemoteSandbox(
            f"http://127.0.0.1:{server.server_address[1]}",
            limits=Limits(wall_s=0.5, output_kib=1, scratch_mib=1),
            key_env="A_KEY",
        )
        with pytest.raises(SandboxFailed, match=reason) as raised:
            remote.run(Program("print(6 * 7)"))
        server.shutdown()
    assert handler.keys == ["Bearer a secret"]
    assert "a secret" not in str(raised.value)


def test_a_program_is_sent_again_only_if_the_server_has_not_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_envs.sandbox.remote.WAITS_S", (0.01, 0.01))
    busy, good, broken = (lambda s: s.say(429)), (lambda s: s.say(200, GOOD)), (lambda s: s.say(500))
    for answers, num_sent in (([busy, busy, good], 3), ([busy, busy, busy, good], None), ([broken, good], None)):
        server, handler = _answered(*answers)
        with server:
            remote = RemoteSandbox(f"http://127.0.0.1:{server.server_address[1]}")
            if num_sent:
                assert remote.run(Program("print(6 * 7)")).stdout == b"42\n"
                assert len(handler.keys) == num_sent
            else:
                with pytest.raises(SandboxFailed):
                    remote.run(Program("print(6 * 7)"))
            server.shutdown()


def test_a_server_without_its_key_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="NO_SUCH_KEY"):
        open_sandbox(SandboxConfig(url="http://127.0.0.1:9", key_env="NO_SUCH_KEY"))


PAIRS = {"tests": [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10"}]}
CALLS = {"function": "add", "tests": [{"arguments": [1, 2], "result": 3}, {"arguments": [2, 2], "result": 4}]}
ASSERTED = {"test_code": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
SOLUTIONS = (
    ("print(2 * int(input()))", PAIRS),
    ("print(4); input() == '5' and 1 / 0", PAIRS),
    ("x = bytearray(10**10)", {"tests": PAIRS["tests"][:1]}),
    ("import os; os.abort()", {"tests": PAIRS["tests"][:1]}),
    ("def add(a, b): return a + b", CALLS),
    ("def add(a, b):\n    print('x' * 100); return a + b", CALLS),
    ("def add(a, b):\n    import os; os._exit(0)", CALLS),
    ("def add(a, b): return a + b", ASSERTED),
    ("import sys; sys.exit(0)", ASSERTED),
)


def test_solutions_have_the_same_rewards_on_a_server_and_in_containers(roomy: SandboxServer, engine: Path) -> None:
    turns = [Conversation(str(n), (), i, f"```python\n{s}\n```") for n, (s, i) in enumerate(SOLUTIONS)]
    found = []
    for sandbox in ({"isolation": "limits"}, {"url": roomy.url}, {"service": "docker", "image": "i"}):
        given = {"sandbox": {**sandbox, "wall_s": 60.0}, "reward": "share"}
        environment = CodeEnvironment(CodeConfig.model_validate(given))
        results = environment.step(turns, [None] * len(turns))
        found.append([each.rewards() | dict(each.info) for each in results if isinstance(each, StepResult)])
    assert len(found[0]) == len(turns)
    assert found[0] == found[1] == found[2]
    assert [each["reward"] for each in found[0]] == [1, 0.5, 0, 0, 1, 1, 0, 1, 0]


def test_a_server_that_fails_once_costs_one_rollout_and_no_reward() -> None:
    server, _ = _answered(lambda s: s.say(200, GOOD), lambda s: s.say(500), lambda s: s.say(200, GOOD))
    with server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        environment = CodeEnvironment(CodeConfig(sandbox=SandboxConfig(url=url)))
        info = {"tests": [{"input": "", "output": "42"}]}
        turns = [Conversation(str(n), (), info, "```python\nprint(42)\n```") for n in range(3)]
        first, second, third = environment.step(turns, [None] * 3)
        server.shutdown()
    assert isinstance(second, EnvironmentFailure)
    assert second.fault == "process"
    assert "HTTP 500" in second.reason
    assert [each.reward for each in (first, third) if isinstance(each, StepResult)] == [1.0, 1.0]


def test_a_row_brings_its_image(engine: Path) -> None:
    config = CodeConfig(sandbox=SandboxConfig(service="docker"))
    info = {"tests": [{"input": "", "output": "of-the-row"}], "image": "of-the-row"}
    turn = Conversation("0", (), info, "```python\nimport os; print(os.environ['OF_IMAGE'])\n```")
    [result] = CodeEnvironment(config).step([turn], [None])
    assert isinstance(result, StepResult)
    assert result.reward == 1.0
    [failure] = CodeEnvironment(config).step([Conversation("0", (), PAIRS, turn.completion)], [None])
    assert isinstance(failure, EnvironmentFailure)
    assert "set sandbox.image" in failure.reason
    check_row(info, config)
    with pytest.raises(UnusableAnswer, match=r"set sandbox\.service"):
        check_row(info, CodeConfig())
    with pytest.raises(UnusableAnswer, match="name of an image"):
        check_row({**info, "image": "--privileged"}, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://x", "service": "docker"}, "cannot be used with url"),
        ({"key_env": "KEY"}, "without url"),
        ({"image": "i"}, "without service"),
        ({"service": "docker", "commands": ["/bin"]}, "which decides"),
        ({"service": "docker", "python_path": ["x"]}, "which decides"),
        ({"url": "http://x", "isolation": "limits"}, "which decides"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SandboxConfig.model_validate(settings)


def test_a_job_has_everything_of_its_program() -> None:
    program = Program("x", b"in", {"f": b"data"}, variables={"A": "b"}, folder="w", snapshot="w")
    job = job_of(program, Limits(), "mark")
    size = int.from_bytes(job[:8], "big")
    header = json.loads(job[8 : 8 + size])
    assert (header["variables"], header["folder"], header["snapshot"]) == ({"A": "b"}, "w", "w")
    assert job[8 + size :].startswith(b"xin")


@pytest.mark.skipif(shutil.which("podman") is None or not os.environ.get("RL_TEST_IMAGE"), reason="needs podman")
def test_programs_end_alike_in_real_containers() -> None:
    """`RL_TEST_IMAGE` is an image with Python that is on this machine."""
    podman = open_sandbox(SandboxConfig(service="podman", image=os.environ["RL_TEST_IMAGE"]))
    assert list(differences(podman)) == []
