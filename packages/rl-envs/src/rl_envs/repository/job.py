"""An agent at work on its repository, in a thread, and the score of its working copy."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rl_core.errors import InfrastructureFailed, RLError
from rl_core.rollouts.environment import AgentRun, this_network
from rl_envs.repository.plugin import RepositoryConfig
from rl_envs.repository.solution import SolutionFiles, installed_modules
from rl_envs.repository.task import RepositoryTask, is_python
from rl_envs.repository.working_copy import Repositories, overlaid
from rl_envs.sandbox import tree
from rl_envs.sandbox.program import Cancellation, Limits, Program
from rl_envs.sandbox.relay import Relay
from rl_envs.sandbox.runner import Runner
from rl_envs.sandbox.tree import TreeEntry

FOLDER = "repository"
"""Folder of the working copy in the scratch folder of a sandbox."""
OWN_FOLDER = "agent"
"""Folder of an agent's own files, next to the working copy."""
PROMPT_FILE = "prompt.json"
"""Name of the file with the prompt among them."""
LOOPBACK = "127.0.0.1"


class AgentUnreachable(RLError):
    """Raised if the policy cannot be reached from where the agent would run."""


class Score(NamedTuple):
    """Numbers of a row's test commands.

    Args:
        num_passed, num_tests: Commands that succeed, and all commands.
        problem: The first command that fails, and how it ended; empty if none fails.
    """

    num_passed: int
    num_tests: int
    problem: str = ""


class Result(NamedTuple):
    """The end of an agent.

    Args:
        score: Score of its working copy; None if it failed.
        failure: Reason of its failure; empty if it did not fail.
        is_infrastructure: True if it failed because its sandbox did, so that it may begin again.
        output: Its stdout, then its stderr.
        ended: Description of its end.
        ignored: Paths of files that it wrote and that do not count.
    """

    score: Score | None
    failure: str = ""
    output: str = ""
    ended: str = ""
    ignored: Sequence[str] = ()
    is_infrastructure: bool = False


class AgentJob:
    """Runs one agent, then its tests. The policy's calls pass through the sandbox's relay.

    Args:
        agent: The agent.
        task: Repository and tests.
        prompt: Contents of the file `RL_PROMPT_FILE`, which it reads.
        runner: Where it runs, and its tests.
        repositories: Files of repositories.
        config: Settings of the environment.
    """

    def __init__(
        self,
        agent: AgentRun,
        task: RepositoryTask,
        prompt: Mapping[str, Any],
        runner: Runner,
        repositories: Repositories,
        config: RepositoryConfig,
    ) -> None:
        self._agent, self._task, self._prompt = agent, task, prompt
        self._runner, self._repositories, self._config = runner, repositories, config
        self._cancellation = Cancellation()
        self.end = self._cancellation.cancel
        """End the agent, or its tests, if they run."""
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    @property
    def result(self) -> Result | None:
        """Its end; None while it is at work."""
        return None if self._thread.is_alive() else self._result

    def _play(self) -> None:
        try:
            self._result = self._played()
        except Exception as error:  # noqa: BLE001 - a failure becomes a report of this rollout
            reason, is_infrastructure = (
                f"{type(error).__name__}: {error}"[:2000],
                isinstance(error, InfrastructureFailed),
            )
            self._result = Result(None, reason, is_infrastructure=is_infrastructure)

    def _played(self) -> Result:
        config, task, limits = self._config, self._task, self._config.sandbox.limits
        base, installed = self._repositories.entries(task), installed_modules(config.sandbox.python_path)
        if task.image:
            in_image = self._repositories.in_image(task, self._runner, limits, self._cancellation)
            base, installed = in_image.entries if task.image_folder else base, installed | in_image.modules
        outcome = self._runner.run(self._program(base), limits, self._cancellation)
        ended = outcome.describe(limits)
        output = (outcome.stdout + outcome.stderr).decode(errors="replace")
        # An agent that reaches a limit of its sandbox has not failed.
        if outcome.ending == "signal" or (outcome.ending == "exit" and not outcome.ok):
            return Result(None, f"the agent failed: {ended}", output, ended)
        if outcome.snapshot_problem:
            failure = f"the agent's working copy cannot be scored: {outcome.snapshot_problem}"
            return Result(None, failure, output, ended)
        left = tree.unpack(outcome.snapshot, limits.scratch_mib * 2**20)
        solution = SolutionFiles(base, task, config.solution, config.protected, installed)
        files, ignored = solution.working_copy(left)
        found = score(files, task, self._runner, limits, self._cancellation, stop_early=config.reward == "all")
        return Result(found, "", output, ended, ignored)

    def _program(self, base: Sequence[TreeEntry]) -> Program:
        agent, task, place = self._agent, self._task, self._runner.place
        folder = f"~/{OWN_FOLDER}" if task.image_folder else f"../{OWN_FOLDER}"
        own = [
            TreeEntry(OWN_FOLDER),
            TreeEntry(f"{OWN_FOLDER}/{PROMPT_FILE}", json.dumps(self._prompt, default=str).encode()),
            *(TreeEntry(f"{OWN_FOLDER}/{name}", content) for name, content in agent.files.items()),
        ]
        relay, host = None, agent.host
        if not place:
            relay, host = relay_to(agent), LOOPBACK
        else:
            check_reached_from(place, self._config.sandbox.url, agent)
        return Program(
            command=tuple(f"{folder}/{each}" if each in agent.files else each for each in agent.command),
            variables={**agent.variables_at(host), "RL_PROMPT_FILE": f"{folder}/{PROMPT_FILE}"},
            tree=placed(base, own),
            folder=FOLDER,
            snapshot=FOLDER,
            relay=relay,
            has_network=bool(place),
            image=task.image,
            place=task.image_folder,
        )


def relay_to(agent: AgentRun) -> Relay:
    """Return the address of an agent's policy for a sandbox of this machine.

    Raises:
        AgentUnreachable: If it is a loopback address of another machine.
    """
    host = socket.getaddrinfo(agent.host, agent.port, type=socket.SOCK_STREAM)[0][4][0]
    assert isinstance(host, str)
    if _is_loopback(host) and agent.network != this_network():
        raise AgentUnreachable(
            f"the policy is served at {agent.host}, a loopback address of another node than the environment's; set "
            "agent.host to an address of that node which others reach"
        )
    return Relay(host, agent.port)


def check_reached_from(place: str, url: str | None, agent: AgentRun) -> None:
    """Raise an `AgentUnreachable` if sandboxes on another machine are given a loopback address.

    Args:
        place: Description of the sandboxes.
        url: Address of their server; None for a service.
        agent: The agent.
    """
    if _is_loopback(agent.host) and not _is_loopback(urlsplit(url or "").hostname or ""):
        raise AgentUnreachable(
            f"the policy is served at {agent.host}, a loopback address, which {place} cannot reach; set agent.host to "
            "an address of the node of generation"
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def score(
    files: Sequence[TreeEntry],
    task: RepositoryTask,
    runner: Runner,
    limits: Limits,
    cancellation: Cancellation,
    *,
    stop_early: bool,
) -> Score:
    """Run each test command in its own sandbox, without a network, on a fresh copy of the files.

    Args:
        files: The working copy, with protected files as they are in the repository.
        task: The tests.
        runner: Where they run.
        limits: Limits of each command.
        cancellation: Ends them.
        stop_early: True to leave out the commands after the first that fails.
    """
    test_files = [TreeEntry(path, text.encode()) for path, text in task.test_files.items()]
    packed = placed(overlaid(files, test_files))
    num_passed, problem = 0, ""
    for command in task.commands:
        program = Program(command=command, tree=packed, folder=FOLDER, image=task.image, place=task.image_folder)
        outcome = runner.run(program, limits, cancellation)
        failure = ""
        if not outcome.ok:
            failure = outcome.describe(limits)
        elif is_python(command) and not outcome.is_complete:
            failure = "a file of the repository ended it (os._exit, or sys.exit outside of its main file)"
        num_passed += not failure
        problem = problem or (failure and f"{' '.join(command)}: {failure}")
        if failure and stop_early:
            break
    return Score(num_passed, len(task.commands), problem)


def placed(files: Sequence[TreeEntry], beside: Sequence[TreeEntry] = ()) -> bytes:
    """Pack a working copy in its folder, with files next to it, into an archive."""
    moved = [TreeEntry(f"{FOLDER}/{each.path}", each.content, each.link, each.is_executable) for each in files]
    return tree.pack([TreeEntry(FOLDER), *moved, *beside])
