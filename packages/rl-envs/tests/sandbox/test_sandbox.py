"""Programs run in a sandbox and tell how they ended."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from rl_envs.sandbox import sandbox as sandboxes
from rl_envs.sandbox.confinement import FIRST_UID, MAX_SLOTS, devices, first_user_id
from rl_envs.sandbox.kernel import syscalls
from rl_envs.sandbox.processes import ProcessTable
from rl_envs.sandbox.program import Isolation, Limits, Outcome, Program, program_of, request_of
from rl_envs.sandbox.remote import RemoteSandbox
from rl_envs.sandbox.runner import SandboxFailed
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.server import SandboxServer
from rl_envs.sandbox.session import Session


def test_a_program_reads_its_input_and_its_files_and_writes_its_output(sandbox: Sandbox) -> None:
    source = "import sys\nprint(input()[::-1], open('data.txt').read())\nprint('é', file=sys.stderr)"
    outcome = sandbox.run(Program(source, stdin=b"abc\n", files={"data.txt": b"x" * 10}))
    assert outcome.ok
    assert outcome.stdout == b"cba xxxxxxxxxx\n"
    assert outcome.stderr == "é\n".encode(errors="backslashreplace")


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("raise SystemExit", 0, ""),
        ("def f():\n    return 1 / 0\nf()", 1, "ZeroDivisionError: division by zero"),
        ("x = = 1", 1, "SyntaxError: invalid syntax"),
        ("import os; os._exit(9)", 9, ""),
        ("exit()", 0, ""),
        ("if True: print('No'); quit(3)", 3, ""),
        ("exit('no')", 1, "no"),
        ("def f():\n    exit(4)\nf()", 4, ""),
        ("assert all(map(callable, [copyright, credits, license, help]))", 0, ""),
        ("print(int(str(10**9_999)) + 10**9_999)", 0, ""),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ],
)
def test_the_end_of_a_program_is_as_pythons(sandbox: Sandbox, source: str, code: int, words: str) -> None:
    outcome = sandbox.run(Program(source))
    assert (outcome.ending, outcome.exit_code, outcome.last_words) == ("exit", code, words)


@pytest.mark.parametrize("isolation", get_args(Isolation))
def test_every_level_has_exit_and_long_whole_numbers(isolation: Isolation) -> None:
    try:
        opened = Sandbox(isolation, limits=Limits(cpu_s=20.0, wall_s=120.0))
    except SandboxUnavailable:
        pytest.skip(f"this machine offers no {isolation}")
    with opened:
        outcome = opened.run(Program("print(10**5_000)\nexit()\nprint('more')"))
    assert (outcome.exit_code, len(outcome.stdout)) == (0, 5_002)


def test_a_traceback_shows_the_program_and_nothing_of_the_sandbox(sandbox: Sandbox) -> None:
    stderr = sandbox.run(Program("def f():\n    return 1 / 0\nf()")).stderr.decode()
    assert "    return 1 / 0" in stderr
    assert "rl_envs" not in stderr
    assert "interpreter.py" not in stderr


def test_threads_and_exit_handlers_end_as_in_python(sandbox: Sandbox) -> None:
    source = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    assert sandbox.run(Program(source)).stdout == b"late\n"


def test_modules_of_the_library_can_be_imported_and_others_not(sandbox: Sandbox) -> None:
    for module in ("sqlite3", "ssl", "decimal", "asyncio", "xml.etree.ElementTree", "concurrent.futures"):
        outcome = sandbox.run(Program(f"import {module}"))
        assert outcome.ok, outcome.last_words
    for module in ("pydantic", "rl_envs", "rl_core"):
        assert sandbox.run(Program(f"import {module}")).last_words.startswith("ModuleNotFoundError")


def test_an_event_loop_runs(sandbox: Sandbox) -> None:
    assert sandbox.run(Program("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))")).stdout == b"5\n"


def test_packages_of_a_named_folder_can_be_imported(tmp_path: Path, sandbox: Sandbox) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "extra_module.py").write_text("VALUE = 7")
    with Sandbox(sandbox.isolation, python_path=[str(tmp_path)]) as opened:
        outcome = opened.run(Program("import extra_module; print(extra_module.VALUE)"))
    assert outcome.stdout == b"7\n", outcome.last_words


def test_a_program_starts_alike_each_time(sandbox: Sandbox) -> None:
    source = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd'}), hash('x'))"
    assert sandbox.run(Program(source)).stdout == sandbox.run(Program(source)).stdout


def test_output_is_cut_at_its_limit(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("print('x' * 10**7)"), replace(sandbox.limits, output_kib=16))
    assert outcome.ending == "output"
    assert outcome.stdout == b"x" * 16 * 1024


def test_output_up_to_the_limit_is_whole(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("import os\nos.write(1, b'x' * 16384)"), replace(sandbox.limits, output_kib=16))
    assert outcome.ok
    assert len(outcome.stdout) == 16384


def test_large_input_is_read_whole(sandbox: Sandbox) -> None:
    source = "import sys; print(len(sys.stdin.buffer.read()))"
    assert sandbox.run(Program(source, stdin=b"x" * 10**7)).stdout == b"10000000\n"


def test_input_that_is_not_read_harms_nobody(sandbox: Sandbox) -> None:
    assert sandbox.run(Program("print('done')", stdin=b"x" * 10**7)).stdout == b"done\n"


def test_memory_that_python_cannot_allocate_is_told(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("x = bytearray(2**32)"), replace(sandbox.limits, memory_mib=256))
    assert outcome.out_of_memory


def test_a_signal_is_told(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program("import os; os.abort()"))
    assert (outcome.ending, outcome.signal) == ("signal", signal.SIGABRT)


def test_programs_run_side_by_side(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda i: sandbox.run(Program(f"print({i} ** 2)")), range(32)))
    assert [outcome.stdout for outcome in outcomes] == [f"{i**2}\n".encode() for i in range(32)]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sandbox_whose_process_was_killed_or_stopped_starts_another(sandbox: Sandbox, end: signal.Signals) -> None:
    with Sandbox(sandbox.isolation) as opened:
        assert opened._zygote is not None
        opened._zygote.send_signal(end)
        os.waitid(os.P_PID, opened._zygote.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert opened.run(Program("print(1)")).stdout == b"1\n"


def test_a_program_cannot_pass_for_one_that_was_not_run(sandbox: Sandbox) -> None:
    source = (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\xff\\xff\\xff\\xffx')\n    except OSError: pass"
    )
    assert sandbox.run(Program(source + "\nos._exit(1)")).exit_code == 1


def test_files_need_plain_names() -> None:
    with pytest.raises(ValueError, match="plain name"):
        Program("", files={"../x": b""})


def test_a_request_arrives_as_it_was_sent() -> None:
    program = Program("print('é')", stdin=b"\xff", files={"a": b"1", "b": b""}, interactive=True)
    assert program_of(*request_of(program, Limits(cpu_s=2.5))) == (program, Limits(cpu_s=2.5))


def test_user_ids_of_two_sandboxes_are_apart_and_exist() -> None:
    everyone = [(0, 2**32 - 1)]
    assert first_user_id(7, everyone) == FIRST_UID + 7 * MAX_SLOTS
    few = [(0, 65536)]
    for owner in range(1, 5000, 7):
        assert 32768 <= first_user_id(owner, few) <= 65536 - MAX_SLOTS


def test_a_probe_that_got_out_is_a_problem() -> None:
    limits = Limits()
    assert sandboxes.probe_problem(Outcome("exit", 0, stdout=b"[]"), limits) == ""
    assert "gets out: it connects" in sandboxes.probe_problem(Outcome("exit", 0, stdout=b'["it connects"]'), limits)
    assert "does not run" in sandboxes.probe_problem(Outcome("exit", 1, stderr=b"OSError: x"), limits)


def test_the_probe_gets_out_if_nothing_holds_it() -> None:
    with Sandbox("limits") as opened, sandboxes.probe() as (program, limits):
        found = sandboxes.probe_problem(opened.run(program, limits), limits)
    assert "reads a file outside" in found
    assert "connects to a port" in found


def test_an_isolation_that_does_not_hold_is_refused_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "probe_problem", lambda outcome, limits: "a program gets out: it reads")
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.isolation: limits.*sandbox\.url"):
        Sandbox("landlock")


def test_a_server_runs_programs_as_the_sandbox_does(server: SandboxServer) -> None:
    remote = RemoteSandbox(server.url)
    outcome = remote.run(Program("print(input(), open('f').read())", stdin=b"in\n", files={"f": b"file"}))
    assert outcome.ok
    assert outcome.stdout == b"in file\n"
    assert remote.run(Program("raise SystemExit(4)")).exit_code == 4
    assert remote.run(Program("import os; os.abort()")).signal == signal.SIGABRT
    assert remote.run(Program("while True: pass"), Limits(wall_s=1.0)).ending == "deadline"


def test_a_server_that_does_not_answer_is_an_error(server: SandboxServer) -> None:
    with pytest.raises(SandboxFailed, match="did not answer"):
        RemoteSandbox("http://127.0.0.1:9").run(Program(""))
    with pytest.raises(SandboxFailed, match="did not answer"):
        RemoteSandbox(server.url + "/elsewhere").run(Program(""))
    with pytest.raises(ValueError, match="http"):
        RemoteSandbox("file:///etc/passwd")


def test_a_session_whose_output_nobody_takes_ends_at_its_limit(sandbox: Sandbox) -> None:
    flood = """
import os, threading, time
def flood():
    time.sleep(0.3)
    for descriptor in range(3, 16):
        try:
            os.write(descriptor, b"x" * 900_000)
        except OSError:
            pass
threading.Thread(target=flood).start()
"""
    with closing(Session(sandbox, Limits(cpu_s=20.0, wall_s=2.0, output_kib=1024))) as session:
        assert session.execute(flood, timeout_s=60) == ""
        assert sandbox._zygote is not None
        table, deadline = ProcessTable(), time.monotonic() + 60
        while len(list(table._tree(sandbox._zygote.pid))) > 2:  # the session's keeper waits to answer
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("version", [0, 6])
def test_zeros_can_be_read_where_landlock_forbids_to_share_them(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "landlock_version", lambda: version)
    assert ("/dev/zero" in devices()) == bool(version)
    assert devices()[0] == "/dev/null"
