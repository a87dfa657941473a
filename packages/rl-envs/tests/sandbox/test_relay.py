"""Commands in a sandbox: their files, their end, and the one address that they reach."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from rl_envs.sandbox import tree
from rl_envs.sandbox.program import Cancellation, Limits, Outcome, Program
from rl_envs.sandbox.relay import MAX_CONNECTIONS, Relay
from rl_envs.sandbox.remote import RemoteSandbox
from rl_envs.sandbox.sandbox import Sandbox, SandboxFailed, SandboxUnavailable
from rl_envs.sandbox.server import SandboxServer

LIMITS = Limits(cpu_s=20.0, wall_s=120.0, processes=64, scratch_mib=8)


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what it receives, and counts its connections."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        self.num_connections = 0
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                server.num_connections += 1
                while data := self.request.recv(2**16):
                    self.request.sendall(data)

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        return self.server_address[1]


@pytest.fixture(scope="module")
def opened() -> Iterator[Sandbox]:
    try:
        with Sandbox("namespaces", limits=LIMITS) as sandbox:
            yield sandbox
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _run(sandbox: Sandbox, source: str, relay: Relay | None = None) -> Outcome:
    return sandbox.run(Program(command=("python", "-c", source), relay=relay))


def test_a_program_reaches_its_address_with_every_byte_and_nothing_else(opened: Sandbox, echo: Echo) -> None:
    with Echo() as other, socket.create_server(("127.0.0.1", 0)) as third:
        source = f"""
import os, socket
sent = os.urandom(3_000_000)
with socket.create_connection(("127.0.0.1", {echo.port})) as stream:
    import threading
    def send():
        stream.sendall(sent)
        stream.shutdown(socket.SHUT_WR)
    threading.Thread(target=send).start()
    received = b"".join(iter(lambda: stream.recv(2**16), b""))
print(received == sent)
for address in (("127.0.0.1", {other.port}), ("127.0.0.1", {third.getsockname()[1]}), ("192.0.2.1", {echo.port})):
    try:
        socket.create_connection(address, 5)
    except OSError:
        continue
    print("reached", address)
for family, kind in ((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_INET6, socket.SOCK_STREAM),
                     (socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_NETLINK, socket.SOCK_RAW)):
    try:
        socket.socket(family, kind)
    except OSError:
        continue
    print("opened", family, kind)
try:
    socket.create_server(("127.0.0.1", 0))
    print("listens")
except OSError:
    pass
"""
        outcome = _run(opened, source, Relay("127.0.0.1", echo.port))
    assert (outcome.stdout, outcome.exit_code) == (b"True\n", 0), outcome
    assert echo.num_connections == 1


def test_without_a_relay_there_is_no_network(opened: Sandbox, echo: Echo) -> None:
    outcome = _run(opened, f"import socket; socket.create_connection(('127.0.0.1', {echo.port}))")
    assert outcome.last_words.startswith("PermissionError")
    assert echo.num_connections == 0


def test_connections_are_limited_and_end_with_their_program(opened: Sandbox, echo: Echo) -> None:
    source = f"""
import socket
held = [socket.create_connection(("127.0.0.1", {echo.port})) for _ in range({MAX_CONNECTIONS})]
for each in held:
    each.sendall(b"x")
    each.recv(1)
waits = socket.create_connection(("127.0.0.1", {echo.port}))
waits.settimeout(0.5)
waits.sendall(b"x")
try:
    waits.recv(1)
except TimeoutError:
    print("waits")
"""
    assert _run(opened, source, Relay("127.0.0.1", echo.port)).stdout == b"waits\n"
    assert _run(opened, f"import socket; socket.create_connection(('127.0.0.1', {echo.port}))").exit_code == 1


def test_bytes_that_nobody_takes_are_few(opened: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        source = f"""
import socket
with socket.create_connection(("127.0.0.1", {port})) as stream:
    stream.settimeout(2)
    sent = 0
    try:
        while sent < 2**26:
            sent += stream.send(bytes(2**16))
    except TimeoutError:
        pass
    print(sent)
"""
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
        outcome = _run(opened, source, Relay("127.0.0.1", port))
    assert 0 < int(outcome.stdout) < 2**21, outcome


def test_weaker_isolation_refuses_a_relay() -> None:
    with Sandbox("limits") as sandbox, pytest.raises(SandboxFailed, match="use namespaces"):
        sandbox.run(Program("print(1)", relay=Relay("127.0.0.1", 9)))


TREE = tree.pack(
    [
        tree.TreeEntry("work/data.txt", b"data"),
        tree.TreeEntry("own/agent.py", b"import os, sys\nopen('new.txt', 'w').write(sys.argv[1] + os.environ['WORD'])"),
    ]
)


def _works(runner: Sandbox | RemoteSandbox) -> None:
    program = Program(
        command=("python", "../own/agent.py", "an argument and "),
        variables={"WORD": "a variable"},
        tree=TREE,
        folder="work",
        snapshot="work",
    )
    outcome = runner.run(program, LIMITS)
    assert (outcome.ending, outcome.exit_code, outcome.is_complete) == ("exit", 0, True), outcome
    left = {entry.path: entry.content for entry in tree.unpack(outcome.snapshot, 2**20)}
    assert left == {"data.txt": b"data", "new.txt": b"an argument and a variable"}


@pytest.mark.parametrize(
    ("source", "ending", "code", "is_complete"),
    [
        ("pass", "exit", 0, True),
        ("raise SystemExit(3)", "exit", 3, True),
        ("1 / 0", "exit", 1, True),
        ("import os; os._exit(0)", "exit", 0, False),
        ("import os; os.abort()", "signal", None, False),
    ],
)
def test_a_command_ends_as_python_does(
    opened: Sandbox, source: str, ending: str, code: int | None, is_complete: bool
) -> None:
    outcome = _run(opened, source)
    assert (outcome.ending, outcome.exit_code, outcome.is_complete) == (ending, code, is_complete)


def test_a_command_starts_in_its_tree_and_leaves_a_snapshot(opened: Sandbox) -> None:
    _works(opened)


def _ends_by_its_main_file_only(runner: Sandbox | RemoteSandbox) -> None:
    quits = tree.pack(
        [
            tree.TreeEntry("quits.py", b"import sys\ndef quit(): sys.exit(0)\nif __name__ == '__main__': quit()"),
            tree.TreeEntry("exits.py", b"def end(): exit(0)\nif __name__ == '__main__': end()"),
            tree.TreeEntry("tests.py", b"import quits, unittest\nquits.quit()"),
        ]
    )
    for command, is_complete in (
        (("python", "quits.py"), True),
        (("python", "-m", "quits"), True),
        (("python", "-c", "import quits; quits.quit()"), False),
        (("python", "-m", "unittest", "tests"), False),
        (("python", "-c", "import sys; sys.exit(0)"), True),
        (("python", "exits.py"), True),
        (("python", "-c", "exit(0)"), True),
        (("python", "-c", "import exits; exits.end()"), False),
    ):
        outcome = runner.run(Program(command=command, tree=quits))
        assert (outcome.exit_code, outcome.is_complete) == (0, is_complete), (command, outcome)


def test_only_the_main_file_of_a_command_and_packages_end_it(opened: Sandbox) -> None:
    _ends_by_its_main_file_only(opened)


def test_a_command_by_the_protocol_of_sandboxfusion_is_the_same(opened: Sandbox) -> None:
    with SandboxServer(opened) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            remote = RemoteSandbox(server.url, limits=LIMITS)
            _works(remote)
            for source, code, is_complete in (("raise SystemExit(3)", 3, True), ("import os; os._exit(0)", 0, False)):
                outcome = remote.run(Program(command=("python", "-c", source)))
                assert (outcome.exit_code, outcome.is_complete) == (code, is_complete)
            _ends_by_its_main_file_only(remote)
        finally:
            server.shutdown()
            thread.join()


def test_files_of_a_command_do_not_hide_modules_of_the_library(opened: Sandbox) -> None:
    packed = tree.pack([tree.TreeEntry("unittest.py", b"raise SystemExit(0)")])
    outcome = opened.run(Program(command=("python", "-m", "unittest", "missing"), tree=packed))
    assert outcome.exit_code == 1


def test_other_commands_need_their_folders(opened: Sandbox) -> None:
    program = Program(
        command=("sh", "-c", "printf '#!/bin/sh\necho made' > it; chmod +x it; ./it; python3 -c 'print(2)'")
    )
    outcome = opened.run(program)
    assert (outcome.exit_code, b"sandbox.commands" in outcome.stderr) == (126, True)
    with Sandbox("namespaces", limits=LIMITS, commands=["/usr/bin", "/bin"]) as sandbox:
        outcome = sandbox.run(program)
        assert outcome.stdout == b"made\n2\n", outcome
        assert not outcome.is_complete
        assert sandbox.run(Program(command=("no-such-command",))).exit_code == 127


def test_a_program_that_is_cancelled_ends(opened: Sandbox, echo: Echo) -> None:
    cancellation, failures = Cancellation(), []

    def run() -> None:
        source = f"""
import socket, time
socket.create_connection(("127.0.0.1", {echo.port})).sendall(b"x")
time.sleep(100)
"""
        program = Program(command=("python", "-c", source), relay=Relay("127.0.0.1", echo.port))
        try:
            opened.run(program, cancellation=cancellation)
        except SandboxFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    while not echo.num_connections:
        thread.join(0.01)
    cancellation.cancel()
    thread.join(60.0)
    assert len(failures) == 1
    with pytest.raises(SandboxFailed):
        opened.run(Program("print(1)"), cancellation=cancellation)
