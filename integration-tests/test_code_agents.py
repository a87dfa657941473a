"""Coding agents solve and fail tasks on repositories; abuses by agents change nothing outside their own rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from code_agents import ASK, ScriptedPolicy, Stage, stage

from rl_algos.agents.session import AgentSession
from rl_algos.tiny_model import make_tiny_model
from rl_core.rollouts.rollout import Prompt, Rollout
from rl_core.testing.exhaustive import exhaustive
from rl_envs.repository import coding_agent
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable

SANDBOX = {"cpu_s": 20.0, "wall_s": 120.0, "memory_mib": 256, "scratch_mib": 4, "processes": 8, "output_kib": 64}


class Loop:
    """An event loop in a thread, for what several tests share."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for it in the loop."""

        async def waited() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(waited(), self._loop).result(600.0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    try:
        Sandbox("namespaces").close()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    opened = Loop()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def opened(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    context = stage(tmp_path_factory.mktemp("logs"), SANDBOX)
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


def _git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, "-C", str(folder), *arguments], check=True, capture_output=True)


BROKEN = "def double(x):\n    return x\n"
TEST = """
import unittest
from double import double

class TestDouble(unittest.TestCase):
    def test_it_doubles(self):
        self.assertEqual(double(21), 42)
"""


def _folder(base: Path) -> dict[str, Any]:
    (base / "double.py").write_text(BROKEN)
    return {"repository": str(base)}


def _bundle(base: Path) -> dict[str, Any]:
    """A bundle whose newest commit has the solution, and the one before the task."""
    source = base / "source"
    source.mkdir()
    _git(source, "init", "-q", "-b", "main")
    for text in (BROKEN, "def double(x):\n    return 2 * x\n"):
        (source / "double.py").write_text(text)
        _git(source, "add", ".")
        _git(source, "commit", "-q", "-m", "a change")
    _git(source, "tag", "task", "HEAD~1")
    _git(source, "bundle", "create", "-q", str(base / "task.bundle"), "--all")
    return {"repository": str(base / "task.bundle"), "commit": "task"}


def _inline(base: Path) -> dict[str, Any]:
    return {"repository": {"double.py": BROKEN}}


WRITES = (
    ASK
    + """
print(sorted(os.listdir()), open("double.py").read())
open("double.py", "w").write(ask(prompt["messages"]))
"""
)


@pytest.mark.parametrize("made", [_folder, _bundle, _inline])
def test_an_agent_solves_or_fails_a_task_as_its_policy_does(
    loop: Loop, opened: Stage, tmp_path: Path, made: Callable[[Path], dict[str, Any]]
) -> None:
    info = {**made(tmp_path), "tests": "python -m unittest test_double", "test_files": {"test_double.py": TEST}}
    before = sorted(tmp_path.rglob("*"))

    async def played() -> list[Rollout | Exception]:
        async with opened.agent(WRITES) as program:
            return await asyncio.gather(
                *[
                    opened.play(program, f"{made.__name__}{number}", "double(x)?", info, lambda before, text=text: text)
                    for number, text in enumerate(("def double(x): return 2 * x", "def double(x): return 3 * x", "((("))
                ]
            )

    rollouts = loop.run(played())
    assert [rollout.rewards for rollout in rollouts] == [
        {"reward": 1.0, "passed": 1.0},
        {"reward": 0.0, "passed": 0.0},
        {"reward": 0.0, "passed": 0.0},
    ]
    assert rollouts[0].turns[0].text == "def double(x): return 2 * x"
    # neither the history nor the tests
    assert opened.output(f"{made.__name__}0") == f"['double.py'] {BROKEN}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_coding_agent_works_with_shell_commands(loop: Loop, tmp_path: Path) -> None:
    info = {"repository": {"double.py": BROKEN}, "tests": ["python -m unittest test_double", ["true"]]}
    replies = iter(
        ("First I look.\n```bash\ncat double.py\n```", "```bash\nsed -i 's/x$/x * 2/' double.py\n```", "DONE")
    )
    seen: list[str] = []

    def reply(before: str) -> str:
        seen.append(before)
        return next(replies)

    async def played() -> Rollout | Exception:
        sandbox = {**SANDBOX, "processes": 32, "commands": ["/usr/bin", "/bin"]}
        async with stage(tmp_path, sandbox) as opened, opened.agent(Path(coding_agent.__file__).read_text()) as program:
            return await opened.play(
                program, "shell", "Make double.py right.", {**info, "test_files": {"test_double.py": TEST}}, reply
            )

    rollout = loop.run(played())
    assert isinstance(rollout, Rollout), rollout
    assert rollout.reward == 1.0
    assert [turn.text[:5] for turn in rollout.turns] == ["First", "```ba", "DONE"]
    assert "return x\n\n[exit code 0]" in seen[1]


@dataclass(frozen=True)
class Abuse:
    """What an agent does to others, to its sandbox or to its reward.

    Args:
        name: The way, in words.
        source: The agent, behind `ASK`, with `bait`, `refused` and `breach`.
    """

    name: str
    source: str


ABUSES = (
    # the machine
    Abuse("read a file of the machine", "refused(open, bait['file'])"),
    Abuse("write a file of the machine", "refused(open, bait['file'], 'a')"),
    Abuse("list the processes of the machine", "refused(os.listdir, '/proc')"),
    Abuse("look at the files of other rollouts", "breach(os.listdir('..')) if len(os.listdir('..')) > 2 else 0"),
    Abuse(
        "leave by a namespace", "import ctypes\nbreach('unshare') if not ctypes.CDLL(None).unshare(0x10000000) else 0"
    ),
    Abuse(
        "trace another process", "import ctypes\nbreach('ptrace') if not ctypes.CDLL(None).ptrace(16, 1, 0, 0) else 0"
    ),
    Abuse("kill the environment's process", "refused(os.kill, bait['pid'], 9)"),
    Abuse(
        "kill all processes",
        """
import contextlib
for pid, number in ((1, 9), (os.getppid(), 9), (-1, 15)):
    with contextlib.suppress(OSError):
        os.kill(pid, number)
""",
    ),
    Abuse(
        "fork without end",
        """
for _ in range(200):
    try:
        if not os.fork():
            import time
            time.sleep(1000)
    except OSError:
        break
else:
    breach("two hundred processes")""",
    ),
    Abuse(
        "leave a process behind",
        """
import pathlib, signal, time
opened = pathlib.Path(pathlib.Path(bait["file"]).parent.name)
if not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with opened.open("w"):
        signal.pause()
while not opened.exists():
    time.sleep(0.01)""",
    ),
    Abuse("take all memory", "held = [bytearray(2**20) for _ in range(4096)]\nbreach('four GiB')"),
    Abuse("write output without end", "while True: print('x' * 1000)"),
    Abuse(
        "fill the disk",
        """
with open("big", "wb") as file:
    for _ in range(64):
        file.write(bytes(2**20))
        file.flush()
breach("64 MiB")""",
    ),
    # the network
    Abuse(
        "connect to another port", "import socket\nrefused(socket.create_connection, ('127.0.0.1', bait['port']), 5)"
    ),
    Abuse("connect to the internet", "import socket\nrefused(socket.create_connection, ('192.0.2.1', 80), 5)"),
    Abuse("listen", "import socket\nrefused(socket.create_server, ('127.0.0.1', 0))"),
    Abuse("send a datagram", "import socket\nrefused(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)"),
    # the policy's server
    Abuse(
        "hold connections without a request",
        """
import socket, time
held = [socket.create_connection(("127.0.0.1", int(bait["own"].split(":")[2].split("/")[0]))) for _ in range(32)]
for each in held:
    each.sendall(b"POST /rollouts HTTP/1.1\\r\\nHost: ")""",
    ),
    Abuse(
        "call with the key in another rollout",
        "refused(post, bait['other'] + '/v1/chat/completions', os.environ['OPENAI_API_KEY'], {'messages': "
        "prompt['messages']})",
    ),
    Abuse("take another rollout", "refused(post, bait['own'].split('/rollouts')[0] + '/rollouts', 'key', {})"),
    Abuse("send a request that is not one", "refused(post, bait['own'] + '/v1/chat/completions', '', [[[]]])"),
    # the reward
    Abuse(
        "post a reward",
        "refused(post, os.environ['OPENAI_BASE_URL'] + '/reward', os.environ['OPENAI_API_KEY'], {'reward': 1.0})",
    ),
    Abuse("write a reward file", "for name in ('reward.json', '../reward.json'): open(name, 'w').write('1.0')"),
    Abuse(
        "change the tests",
        "open('test_visible.py', 'w').write('')\nopen('test_answer.py', 'w').write('import unittest')\n"
        "os.makedirs('tests')\nopen('tests/__init__.py', 'w').write('import os; os._exit(0)')",
    ),
    Abuse(
        "replace the library and what Python starts with",
        "for name in ('unittest', 'sitecustomize', 'conftest', 'usercustomize'):\n"
        "    open(name + '.py', 'w').write('raise SystemExit(0)')",
    ),
    Abuse("a folder in place of a test", "os.makedirs('test_answer.py/test_answer.py')"),
    Abuse("a solution that ends the tests", "open('answer.py', 'w').write('import os; os._exit(0)')"),
    Abuse("a solution that exits", "open('answer.py', 'w').write('raise SystemExit(0)')"),
    Abuse("a solution that reads the machine", "os.remove('answer.py')\nos.symlink(bait['file'], 'answer.py')"),
    Abuse(
        "a link in place of the working copy",
        "os.chdir('..')\nos.rename('repository', 'moved')\nos.symlink('/', 'repository')",
    ),
    Abuse("a large snapshot", "for n in range(9): os.truncate(os.open(f'{n}', os.O_CREAT | os.O_RDWR), 4 * 2**20)"),
    Abuse("a deep snapshot", "for _ in range(60): os.mkdir('d' * 200); os.chdir('d' * 200)"),
    Abuse("files without end", "for n in range(10**5): open(f'{n}', 'w').close()"),
)

_ABUSER = """
def breach(how):
    print("BREACH", how, flush=True)

def refused(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return
    breach(function.__name__)

if issue.startswith("{"):
    bait = json.loads(issue)
    bait["own"] = os.environ["ANTHROPIC_BASE_URL"]
    ask([{"role": "user", "content": "?"}])
    exec(bait["abuse"], globals())
else:
    open("answer.py", "w").write("ANSWER = " + ask(prompt["messages"]))
"""

_TASK = {
    "repository": {
        "answer.py": "ANSWER = None",
        "test_visible.py": "import unittest, answer\nclass T(unittest.TestCase):\n"
        "    def test_visible(self): self.assertIsInstance(answer.ANSWER, int)",
    },
    "tests": ["python -m unittest test_visible", "python -m unittest test_answer"],
    "test_files": {
        "test_answer.py": "import unittest, answer\nclass T(unittest.TestCase):\n"
        "    def test_answer(self): self.assertEqual(answer.ANSWER, 46)"
    },
}


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.name.replace(" ", "-"))
def test_an_abuse_by_an_agent_changes_nothing_outside_its_rollout(
    loop: Loop, opened: Stage, tmp_path: Path, abuse: Abuse
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ANSWER = 46")
    secret.chmod(0o666)
    name = abuse.name.replace(" ", "_")

    async def played(port: int) -> tuple[Any, ...]:
        async with opened.agent(ASK + _ABUSER) as program:
            unused = Prompt("other", (), np.zeros(0, np.int32), "repository", {})
            other = AgentSession(unused, ScriptedPolicy(str, opened.pool), 100, 1)
            async with program._endpoint.opened(other) as address:
                bait = {"abuse": abuse.source, "file": str(secret), "pid": os.getpid(), "port": port}
                issue = json.dumps({**bait, "other": address.root_url})
                results = await asyncio.gather(
                    opened.play(program, name, issue, _TASK, lambda before: "1"),
                    opened.play(program, f"{name}_beside", "12+34=", _TASK, lambda before: "46"),
                )
                return *results, await opened.play(program, f"{name}_after", "12+34=", _TASK, lambda before: "46")

    with socket.create_server(("127.0.0.1", 0)) as port:
        abuser, beside, after = loop.run(played(port.getsockname()[1]))
        port.setblocking(False)
        with pytest.raises(BlockingIOError):
            port.accept()
    for honest in (beside, after):
        assert isinstance(honest, Rollout), honest
        assert honest.rewards == {"reward": 1.0, "passed": 1.0}
    assert isinstance(abuser, Exception) or abuser.rewards == {"reward": 0.0, "passed": 0.0}
    output = opened.output(name)
    assert "BREACH" not in output
    # only what is meant to fail may fail: the abuse has been tried
    assert "NameError" not in output
    assert "SyntaxError" not in output
    assert secret.read_text() == "ANSWER = 46"
    assert Path("/scratch/repository", tmp_path.name) not in _open_files()


def _open_files() -> Iterator[Path]:
    """Where the descriptors of every process on the machine point to."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        # a process may end at any moment, and its descriptors with it
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    yield Path(f"/proc/{process}/fd", descriptor).readlink()


def test_there_are_thirty_abuses_of_different_kinds() -> None:
    assert len({abuse.name for abuse in ABUSES}) == len(ABUSES) >= 30


@exhaustive
def test_the_tiny_recipe_trains_on_agents_in_sandboxes(loop: Loop, tmp_path: Path, rl: Any, metrics: Any) -> None:
    make_tiny_model(tmp_path / "model", characters="+=0123456789")
    done = rl(
        "train",
        "grpo-code-agent-tiny",
        f"run_dir={tmp_path / 'run'}",
        f"policy.model_name={tmp_path / 'model'}",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=16",
        "policy.generation.backend=hf",
        "policy.generation.max_new_tokens=2",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "grpo.max_num_steps=2",
        "grpo.val_period=0",
        "checkpointing.enabled=false",
        "checkpointing.metric_name=null",
        "cluster.cpu_ranks_per_node=1",
        "logger.tensorboard_enabled=false",
    )
    assert done.code == 0, done.output
    lines = metrics(tmp_path / "run")
    assert [line["reward/passed"] for line in lines if "reward/passed" in line] == [
        line["reward/mean"] for line in lines if "reward/mean" in line
    ]
    assert sum("reward/mean" in line for line in lines) == 2


WAITS = (
    ASK
    + """
import time
print("begun", flush=True)
ask(prompt["messages"])
time.sleep(1000)
"""
)


def test_a_rollout_that_is_given_up_ends_its_agent(loop: Loop, opened: Stage) -> None:
    asked = asyncio.Event()

    def reply(before: str) -> str:
        asked.set()
        return "1"

    async def played() -> Any:
        async with opened.agent(WAITS) as program:
            rollout = asyncio.ensure_future(opened.play(program, "waits", "12+34=", _TASK, reply))
            await asked.wait()
            rollout.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout
            while _num_of_sandboxes() > 1:  # processes do not tell
                await asyncio.sleep(0.02)
            return await opened.play(program, "waits_not", "12+34=", _TASK, reply, deadline_s=0.5)

    assert isinstance(loop.run(played()), TimeoutError)


def _num_of_sandboxes() -> int:
    """Number of processes of sandboxes that this process started: 1 if no program runs."""
    parents: dict[int, int] = {}
    sandboxes = []
    for folder in filter(lambda folder: folder.name.isdigit(), Path("/proc").iterdir()):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"rl_envs.sandbox.zygote" in (folder / "cmdline").read_bytes():
                sandboxes.append(int(folder.name))
        except OSError:
            continue

    def is_own(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(map(is_own, sandboxes))
