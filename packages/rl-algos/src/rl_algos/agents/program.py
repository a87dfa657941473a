"""The rollout program of agents."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_algos.agents.address import Address
from rl_algos.agents.calls import CallRefused, Limits
from rl_algos.agents.endpoint import AgentEndpoint, rewards_of
from rl_algos.agents.launchers import (
    AgentFailed,
    AgentLost,
    EnvironmentLauncher,
    ExternalLauncher,
    Launcher,
    ProcessLauncher,
    Task,
)
from rl_algos.agents.session import AgentSession
from rl_algos.agents.task_board import LeaseExpired, TaskBoard
from rl_algos.connections import collect_rarely
from rl_algos.rollouts.agent_config import AgentConfig
from rl_core.errors import EnvironmentFailed
from rl_core.images import image_digests
from rl_core.rollouts.environment import Conversation
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Prompt, Rollout
from rl_core.user_code import FromFile

_log = logging.getLogger(__name__)

MAX_RESTARTS = 2
"""Maximum number of times that a rollout begins again because its agent was killed from outside."""

AGENTS = "agents"
"""Entry of a returned reward with the rewards of agents by name."""


class AgentProgram:
    """Starts an agent for each rollout, answers its calls of the policy, and makes a rollout of them.

    Args:
        config: Settings of the agent.
        function: The function that `config.run` names, with the text of its file if it is in one; None for other kinds
            of agents.
        files: The agent's own files by name, for one that an environment runs.
        max_tokens: Maximum number of tokens of a conversation.
        split: True to render every conversation anew.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        function: str | FromFile | None,
        max_tokens: int,
        split: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._config = config
        self._limits = Limits(max_tokens, config.max_calls)
        self._split = split
        self._board = TaskBoard(config.lease_s) if config.external else None
        self._endpoint = AgentEndpoint(config.host, self._board, max_tokens)
        self._launcher = _launcher(config, function, self._board, files or {})
        self._logs = Path()

    async def start(self, logs: Path) -> None:
        """Serve the policy, and prepare the agent.

        Args:
            logs: Folder of the run's logs.
        """
        self._logs = logs / "agents"
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._endpoint.start()
        await self._launcher.start()
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
        await self._launcher.close()
        await self._endpoint.close()

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once; from the beginning, if the agent was killed or, elsewhere, does not call any more.

        Returns:
            The rollouts of all agents that have called the policy.

        Raises:
            AgentFailed: If the agent fails, there is no reward, or it was killed `MAX_RESTARTS` times and once more.
            ValueError: If the prompt has images, which agents are not given.
        """
        if image_digests(prompt.messages):
            raise ValueError(
                "the prompt has images, but agents call the policy with text only; remove the section `agent`, or the "
                "images"
            )
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
        session = AgentSession(prompt, client, self._limits, splits=self._split)
        client.on_failure(session.played)
        async with self._endpoint.opened(session, takes_rewards=self._config.reward == "posted") as address:
            returned = await self._launcher.play(self._task(prompt, address, session.id, client))
            if self._config.scores_last_turn:
                returned = await _scored(session, client)
            if returned is not None and self._config.reward != "posted":
                try:
                    _add_rewards(session, returned)
                except CallRefused as error:
                    raise AgentFailed(f"{error}; return a number, or numbers by name") from None
        if missing := session.without_reward:
            named = [name for name in missing if name]
            raise AgentFailed(_NO_REWARD[self._config.reward] + (f" (agents: {', '.join(named)})" if named else ""))
        rollouts = session.rollouts()
        return rollouts[0] if len(rollouts) == 1 else rollouts

    def _task(self, prompt: Prompt, address: Address, conversation_id: str, client: GenerationClient) -> Task:
        name = re.sub(r"[^\w.-]", "_", prompt.id)[-80:]
        log = self._logs / f"{name}-{address.rollout}.log"
        return Task(prompt, address, log, conversation_id, client.step)


_NO_REWARD: dict[Literal["returned", "posted", "environment"], str] = {
    "returned": "the agent returned no reward; return a number, or write one to RL_REWARD_FILE",
    "posted": "no reward was posted before the agent ended; post one with the key in RL_REWARD_KEY",
    "environment": "the environment gave no reward",
}


def _launcher(
    config: AgentConfig, function: str | FromFile | None, board: TaskBoard | None, files: Mapping[str, bytes]
) -> Launcher:
    if board is not None:
        return ExternalLauncher(board)
    if config.place == "environment":
        return EnvironmentLauncher(config.command, files, config.env)
    return ProcessLauncher(function, config.command, config.env, config.grace_s)


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
    """The rewards that the prompt's environment gives for the conversation that the agent ended with."""
    messages = session.messages
    if not messages:
        raise AgentFailed("the agent ended without a completion of the policy, so there is nothing to score")
    text = str(messages[-1].get("content") or "")
    opened = session.opened_thoughts
    scored = Conversation(session.id, messages, session.prompt.info, text, opened_thoughts=opened)
    try:
        return (await client.step(scored)).rewards()
    except EnvironmentFailed as error:
        # its process may have been killed; the conversation is complete, so that another can score it
        _log.warning("rollout of %s is scored again: %s", session.prompt, error)
        return (await client.step(scored)).rewards()
