"""The rollout program of agents, and the ways to start an agent for a rollout."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_algos.agents.calls import CallRefused
from rl_algos.agents.endpoint import AgentEndpoint, rewards_of
from rl_algos.agents.session import AgentSession
from rl_algos.agents.task_board import Address, LeaseExpired, TaskBoard
from rl_algos.connections import collect_rarely
from rl_algos.rollouts.config import AgentConfig, StructuredOutput
from rl_core.agent_processes.launcher import AgentFailed, AgentLost, ProcessLauncher
from rl_core.errors import EnvironmentFailed
from rl_core.images import ImageStore
from rl_core.rollouts.environment import (
    AGENT_FAILURE,
    AGENT_OUTPUT,
    AgentRun,
    Conversation,
    StepResult,
    service_variables,
    this_network,
)
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Message, Prompt, Rollout
from rl_core.user_code import FromFile

_log = logging.getLogger(__name__)

MAX_RESTARTS = 2
"""Maximum number of times that a rollout begins again because its agent was killed from outside."""

AGENTS = "agents"
"""Entry of a returned reward with the rewards of agents by name."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
"""Seconds between questions to an environment whether its agent has ended, at first and at last."""

_NO_REWARD = {
    "returned": "the agent returned no reward; return a number, or write one to RL_REWARD_FILE",
    "posted": "no reward was posted before the agent ended; post one with the key in RL_REWARD_KEY",
    "environment": "the environment gave no reward",
}


@dataclass(frozen=True)
class Task:
    """One rollout to play.

    Args:
        prompt: The prompt.
        address: How the policy is reached.
        log: File for the output of the agent.
        id: Id of the rollout for environments.
        step: The environment's answer to a turn.
    """

    prompt: Prompt
    address: Address
    log: Path
    id: str
    step: Callable[[Conversation], Awaitable[StepResult]]

    @property
    def described(self) -> dict[str, Any]:
        """The prompt as agents read it."""
        prompt = self.prompt
        messages, tools = [*map(_as_sent, prompt.messages)], [dict(tool) for tool in prompt.tools]
        return {"id": prompt.id, "messages": messages, "info": dict(prompt.info), "tools": tools}


def _as_sent(message: Message) -> dict[str, Any]:
    """Return a message as agents send it, with its images as data URLs."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [_sent_part(part) if part["type"] == "image" else dict(part) for part in content]}


def _sent_part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": ImageStore.of_run().data_url(part["image"])}}


Play = Callable[[Task], Awaitable[Any]]
"""Plays one rollout and returns the reward that the agent reports, None for nothing. It raises `AgentFailed`, and
`AgentLost` if the agent was killed from outside."""


class AgentProgram:
    """Starts an agent for each rollout, answers its calls of the policy, and makes a rollout of them.

    Args:
        config: Settings of the agent.
        function: The function of `config.run`, with the text of its file if it is in one; None for other kinds of
            agents.
        files: The agent's own files by name, for one that an environment runs.
        max_tokens: Maximum number of tokens of a conversation.
        split: True to render every conversation anew.
        takes_images: True if the policy reads images.
        structured_output: Treatment of calls that ask for a form of the answer.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        function: str | FromFile | None,
        max_tokens: int,
        split: bool = False,
        takes_images: bool = False,
        structured_output: StructuredOutput = "refuse",
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._config = config
        self._max_tokens = max_tokens
        self._split = split
        self._structured_output = structured_output
        self._board = TaskBoard(config.lease_s) if config.external else None
        self._endpoint = AgentEndpoint(config.host, self._board, max_tokens, takes_images=takes_images)
        self._processes: ProcessLauncher | None = None
        if self._board is not None:
            self._play = _played_elsewhere(self._board)
        elif config.place == "environment":
            self._play = _played_by_environment(config.command, files or {}, config.env)
        else:
            self._processes = ProcessLauncher(function, config.command, config.env, config.grace_s)
            self._play = _played_by_process(self._processes)
        self._logs = Path()

    async def start(self, logs: Path) -> None:
        """Serve the policy, and prepare the agent.

        Args:
            logs: Folder of the run's logs.
        """
        self._logs = logs / "agents"
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._endpoint.start()
        if self._processes is not None:
            await self._processes.start()
        collect_rarely()
        if self._board is not None:
            served = {"url": self._endpoint.url, "key": self._endpoint.board_key}
            file = self._logs / f"{self._endpoint.url.rpartition(':')[2]}.json"
            file.touch(mode=0o600)
            file.write_text(json.dumps(served), encoding="utf-8")
            _log.info("agents take rollouts at %s/rollouts; the key is in %s", self._endpoint.url, file)

    @property
    def num_untaken(self) -> int:
        """See `rl_core.rollouts.program.OfferingProgram`."""
        return 0 if self._board is None else self._board.num_waiting

    async def close(self) -> None:
        """End all agents, and stop serving."""
        if self._processes is not None:
            await self._processes.close()
        await self._endpoint.close()

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once; from the beginning, if the agent was killed or, elsewhere, does not call any more.

        Returns:
            The rollouts of all agents that have called the policy.

        Raises:
            AgentFailed: If the agent fails, there is no reward, or it was killed `MAX_RESTARTS` times and once more.
        """
        num_restarts = 0
        while True:
            try:
                return await self._played(prompt, client)
            except LeaseExpired as error:
                _log.warning("%s; the next agent gets it", error)
            except AgentLost as error:
                num_restarts += 1
                if num_restarts > MAX_RESTARTS:
                    raise
                _log.warning("rollout of %s begins again: %s", prompt, error)

    async def _played(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        config = self._config
        session = AgentSession(
            prompt,
            client,
            self._max_tokens,
            config.max_calls,
            splits=self._split,
            structured_output=self._structured_output,
        )
        client.on_failure(session.played)
        async with self._endpoint.opened(session, takes_rewards=config.reward == "posted") as address:
            name = re.sub(r"[^\w.-]", "_", prompt.id)[-80:]
            log = self._logs / f"{name}-{address.rollout}.log"
            returned = await self._play(Task(prompt, address, log, session.id, client.step))
            if config.scores_last_turn:
                returned = await _scored(session, client)
            if returned is not None and config.reward != "posted":
                try:
                    _add_rewards(session, returned)
                except CallRefused as error:
                    raise AgentFailed(f"{error}; return a number, or numbers by name") from None
        if missing := session.without_reward:
            named = [name for name in missing if name]
            raise AgentFailed(_NO_REWARD[config.reward] + (f" (agents: {', '.join(named)})" if named else ""))
        rollouts = session.rollouts()
        return rollouts[0] if len(rollouts) == 1 else rollouts


def _add_rewards(session: AgentSession, returned: Any) -> None:
    """Set rewards of the rollout, and of agents if they are by name under `agents`."""
    of_agents = returned.get(AGENTS) if isinstance(returned, Mapping) else None
    if of_agents is None:
        session.add_rewards(rewards_of(returned))
        return
    if not isinstance(of_agents, Mapping):
        raise CallRefused(f"`{AGENTS}` must be rewards by the names of agents, got {of_agents!r:.80}")
    own = {name: reward for name, reward in returned.items() if name != AGENTS}
    if own:
        session.add_rewards(rewards_of(own))
    for name, rewards in of_agents.items():
        session.of_agent(str(name)).add_rewards(rewards_of(rewards))


async def _scored(session: AgentSession, client: GenerationClient) -> Any:
    """Return the rewards that the prompt's environment gives for the conversation that the agent ended with."""
    messages, opened = session.messages, session.opened_thoughts
    if not messages:
        raise AgentFailed("the agent ended without a completion of the policy, so there is nothing to score")
    text = str(messages[-1].get("content") or "")
    scored = Conversation(session.id, messages, session.prompt.info, text, opened_thoughts=opened)
    try:
        return (await client.step(scored)).rewards()
    except EnvironmentFailed as error:
        # Its process may have been killed. The conversation is complete, so another one can score it.
        _log.warning("rollout of %s is scored again: %s", session.prompt, error)
        return (await client.step(scored)).rewards()


def _played_by_process(launcher: ProcessLauncher) -> Play:
    """Return a function that plays a rollout in a process next to the rollout worker."""

    async def play(task: Task) -> Any:
        variables = service_variables(task.address.root_url, task.address.api_key)
        if task.address.reward_key:
            variables["RL_REWARD_KEY"] = task.address.reward_key
        return await launcher.play(task.described, variables, task.log)

    return play


def _played_elsewhere(board: TaskBoard) -> Play:
    """Return a function that waits until an agent elsewhere has taken a rollout from the board and ended it."""

    async def play(task: Task) -> None:
        await board.play(task.described, task.address)

    return play


def _played_by_environment(command: Sequence[str], files: Mapping[str, bytes], env: Mapping[str, str]) -> Play:
    """Return a function that lets the environment of each prompt run the agent, and asks it for the end.

    A cancelled rollout is abandoned, which ends the agent.

    Args:
        command: The command.
        files: The agent's own files, by name.
        env: Its environment variables.
    """

    async def play(task: Task) -> Any:
        address, prompt = task.address, task.prompt
        run = AgentRun(tuple(command), files, env, address.root_url, address.api_key, network=this_network())
        asked = Conversation(task.id, prompt.messages, prompt.info, "", agent_run=run)
        pause_s = _FIRST_PAUSE_S
        while not (result := await task.step(asked)).done:
            # Each question is a later turn: an environment that has lost the agent must not start it again.
            asked = replace(asked, turn=asked.turn + 1)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        if output := result.info.get(AGENT_OUTPUT):
            task.log.write_text(str(output), encoding="utf-8", errors="replace")
        if failure := result.info.get(AGENT_FAILURE):
            raise AgentFailed(f"{failure}; its output is in {task.log}" if output else str(failure))
        # Without a reward of the whole rollout, an agent that has no reward must not earn 0.
        whole = result.rewards() if result.reward != {} else {}
        return {**whole, AGENTS: result.agent_rewards} if result.agent_rewards else result.rewards()

    return play
