"""Programs that end alike wherever they run: `python -m rl_envs.sandbox.conformance --service file.py:Class`.

The command runs them on a service of yours, and prints which of them end otherwise than in the sandbox of a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rl_envs.sandbox import tree
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.runner import Runner, SandboxFailed
from rl_envs.sandbox.sandbox import open_sandbox
from rl_envs.sandbox.tree import TreeEntry

LIMITS = Limits(cpu_s=20.0, wall_s=60.0, memory_mib=256, scratch_mib=8, processes=16, output_kib=64)
"""Limits of the programs that reach none."""
NUM_AT_ONCE = 4
"""Number of programs that run at one time in the last check."""
MAX_OVERHEAD_S = 20.0
"""Seconds within which a machine is made and removed."""


@dataclass(frozen=True)
class EndingCheck:
    """A program, and how it must end.

    Args:
        name: Description of the check.
        program: The program.
        holds: Returns whether it has ended as it must.
        limits: Its limits.
        is_quick: True if the program must be over in `MAX_OVERHEAD_S`.
    """

    name: str
    program: Program
    holds: Callable[[Outcome], bool]
    limits: Limits = LIMITS
    is_quick: bool = False


_TREE = tree.pack(
    [
        TreeEntry("work/data.txt", b"data"),
        TreeEntry("work/package/__init__.py", b"import sys\ndef quit(): sys.exit(0)"),
        TreeEntry("work/link", link="data.txt"),
        TreeEntry("own/agent.py", b"import os, sys\nopen('new.txt', 'w').write(sys.argv[1] + os.environ['WORD'])"),
        *(TreeEntry(f"many/{number}.txt", b"%d" % number) for number in range(80)),
    ]
)
_AGENT = ("python", "../own/agent.py", "an argument and ")
_DAEMON = """
import os, sys, time
print("before", flush=True)
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(100)
    os._exit(0)
time.sleep(0.2)
"""
_FORKS = """
import os, time
for _ in range(60):
    try:
        if not os.fork():
            time.sleep(30)
            os._exit(0)
    except OSError:
        raise SystemExit(9)
time.sleep(2)
"""


def _ends(ending: str, code: int | None = None, stdout: bytes | None = None) -> Callable[[Outcome], bool]:
    def holds(outcome: Outcome) -> bool:
        is_right = (outcome.ending, outcome.exit_code) == (ending, code)
        return is_right and stdout in (None, outcome.stdout)

    return holds


def _files(outcome: Outcome) -> dict[str, bytes | None]:
    return {each.path: each.content for each in tree.unpack(outcome.snapshot, 2**23) if each.content is not None}


def _python(source: str) -> Program:
    return Program(command=("python", "-c", source), tree=_TREE, folder="work")


CHECKS = (
    EndingCheck("output", Program("print('a\\u00e9', 6 * 7)"), _ends("exit", 0, "a\u00e9 42\n".encode())),
    EndingCheck("an exit code", Program("print(1); raise SystemExit(3)"), _ends("exit", 3, b"1\n")),
    EndingCheck("an exit with words", Program("exit('why')"), lambda o: o.exit_code == 1 and o.last_words == "why"),
    EndingCheck(
        "an exception",
        Program("def f(): return 1 / 0\nf()"),
        lambda o: o.exit_code == 1 and o.last_words == "ZeroDivisionError: division by zero",
    ),
    EndingCheck("standard input", Program("print(input()[::-1])", stdin=b"abc\n"), _ends("exit", 0, b"cba\n")),
    EndingCheck(
        "a large binary input",
        Program("import sys; read = sys.stdin.buffer.read(); print(len(read), sum(read))", bytes(range(256)) * 4096),
        _ends("exit", 0, b"%d %d\n" % (2**20, 255 * 128 * 4096)),
    ),
    EndingCheck(
        "binary output",
        Program("import sys; sys.stdout.buffer.write(bytes(range(256)))"),
        _ends("exit", 0, bytes(range(256))),
    ),
    EndingCheck(
        "files",
        Program("import os; print(open('a b').read(), sorted(os.listdir()))", files={"a b": b"x", "c": bytes(1000)}),
        _ends("exit", 0, b"x ['a b', 'c']\n"),
    ),
    EndingCheck(
        "many files",
        replace(_python("import os; print(sum(int(open(n).read()) for n in os.listdir()))"), folder="many"),
        _ends("exit", 0, b"3160\n"),
    ),
    EndingCheck("an empty folder", Program("import os; print(os.listdir())"), _ends("exit", 0, b"[]\n")),
    EndingCheck(
        "a writable home",
        Program("import os; open('own', 'w').close(); print(os.environ['HOME'] == os.getcwd())"),
        _ends("exit", 0, b"True\n"),
    ),
    EndingCheck(
        "the same draws, and large numbers",
        Program("import random; print(random.random(), len(str(10**5000)))"),
        _ends("exit", 0, b"0.8444218515250481 5001\n"),
    ),
    EndingCheck(
        "a signal", Program("import os; os.abort()"), lambda o: (o.ending, o.exit_code, o.signal) == ("signal", None, 6)
    ),
    EndingCheck(
        "the time limit",
        Program("import time; print('before', flush=True); time.sleep(60)"),
        _ends("deadline", None, b"before\n"),
        replace(LIMITS, wall_s=1.5),
    ),
    EndingCheck("the limit of CPU", Program("while True: pass"), _ends("cpu"), replace(LIMITS, cpu_s=1.0)),
    EndingCheck("the limit of memory", Program("x = bytearray(10**9)"), lambda o: not o.ok and o.out_of_memory),
    EndingCheck(
        "the limit of output",
        Program("while True: print('x' * 1000)"),
        lambda o: o.ending == "output" and len(o.stdout) == 2**16,
    ),
    EndingCheck(
        "the limit of a file",
        Program("open('f', 'wb').write(bytes(2**24))"),
        lambda o: not o.ok and o.ending in ("exit", "signal"),
    ),
    EndingCheck("a process that stays", Program(_DAEMON), _ends("exit", 0, b"before\n"), is_quick=True),
    EndingCheck("the limit of processes", Program(_FORKS), lambda o: not o.ok, is_quick=True),
    EndingCheck(
        "a command with its tree",
        Program(command=_AGENT, variables={"WORD": "a variable"}, tree=_TREE, folder="work", snapshot="work"),
        lambda o: (
            o.ok
            and o.is_complete
            and _files(o)
            == {
                "data.txt": b"data",
                "package/__init__.py": b"import sys\ndef quit(): sys.exit(0)",
                "new.txt": b"an argument and a variable",
            }
        ),
    ),
    EndingCheck(
        "a snapshot of a command at its limit",
        replace(_python("import time; open('data.txt', 'w').write('left'); time.sleep(60)"), snapshot="work"),
        lambda o: o.ending == "deadline" and _files(o)["data.txt"] == b"left",
        replace(LIMITS, wall_s=2.0),
    ),
    EndingCheck(
        "a snapshot that is too large",
        replace(_python("for n in range(12): open(f'f{n}', 'wb').write(bytes(2**20))"), snapshot="work"),
        lambda o: not o.ok or bool(o.snapshot_problem),
    ),
    EndingCheck("the end of Python", _python("raise SystemExit(0)"), lambda o: o.ok and o.is_complete),
    EndingCheck("an end by os._exit", _python("import os; os._exit(0)"), lambda o: o.ok and not o.is_complete),
    EndingCheck("an end by a file", _python("import package; package.quit()"), lambda o: o.ok and not o.is_complete),
    EndingCheck("a module", replace(_python(""), command=("python", "-m", "package")), lambda o: o.exit_code == 1),
    EndingCheck(
        "a program that kills its parent",
        Program("import os, signal, time\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ntime.sleep(0.5)"),
        lambda o: o.ending in ("exit", "signal"),
        is_quick=True,
    ),
)
"""Programs whose ends are the same in every sandbox that starts processes."""


def differences(runner: Runner, checks: Sequence[EndingCheck] = CHECKS) -> Iterator[str]:
    """Yield descriptions of wrong ends of programs: of each check, and of several programs at one time."""
    for check in checks:
        begin = time.monotonic()
        try:
            outcome = runner.run(check.program, check.limits)
        except SandboxFailed as error:
            yield f"{check.name}: {error}"
            continue
        if not check.holds(outcome):
            yield f"{check.name}: {replace(outcome, snapshot=outcome.snapshot[:20])!r:.500}"
        elif check.is_quick and time.monotonic() - begin > MAX_OVERHEAD_S:
            yield f"{check.name}: it took {time.monotonic() - begin:.0f} s"
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        programs = [Program(f"import os; open('f', 'x').close(); print({n} * 7)") for n in range(NUM_AT_ONCE)]
        for number, outcome in enumerate(threads.map(lambda each: runner.run(each, LIMITS), programs)):
            if outcome.stdout != b"%d\n" % (7 * number):
                yield f"{NUM_AT_ONCE} at once: {outcome!r:.500}"


def main() -> None:
    """Run the programs in the sandbox of the command line, and print those that end otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", help="docker, podman, e2b, modal, or file.py:Class")
    parser.add_argument("--url", help="address of a server with POST /run_code")
    parser.add_argument("--key-env", default="", help="environment variable with the key of the server")
    parser.add_argument("--image", default="", help="image of the machines of the service")
    given = parser.parse_args()
    config = SandboxConfig(service=given.service, url=given.url, key_env=given.key_env, image=given.image)
    with contextlib.closing(open_sandbox(config)) as runner:
        found = list(differences(runner))
    for each in found:
        print(each)  # noqa: T201  # the result
    print(f"{len(CHECKS) + 1 - len(found)} of {len(CHECKS) + 1} programs end as they must")  # noqa: T201
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
