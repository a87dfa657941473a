"""The environment `verifiers`, which plays tasks by the agents of the verifiers package, without importing it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from rl_core.agent_processes.launcher import AgentFailed, AgentFunction, AgentLost, ProcessLauncher
from rl_core.rollouts.environment import (
    AGENT_FAILURE,
    AGENT_OUTPUT,
    AgentRun,
    Conversation,
    EnvironmentFailure,
    StepResult,
    UnusableAnswer,
)
from rl_envs.verifiers.agent import VerifiersAgent
from rl_envs.verifiers.plugin import VerifiersConfig

GRACE_S = 5.0
"""Seconds that the processes of a rollout have to end by themselves."""
MAX_OUTPUT = 2**16
"""Maximum number of bytes of an agent's output that are reported, from its end."""
_AT_WORK = ({"role": "user", "content": "The agent is at work."},)


class VerifiersEnvironment:
    """Plays each conversation in a process of its own, which is forked from one that has the taskset imported.

    A taskset that raises, hangs or ends its process costs that rollout. The state of a conversation is its agent at
    work; closing it ends the agent and all that it has started.

    Args:
        config: Its settings.
    """

    def __init__(self, config: VerifiersConfig) -> None:
        self._config = config
        self._launchers: dict[str, ProcessLauncher] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Future[StepResult] | None]
    ) -> list[StepResult | EnvironmentFailure]:
        """Start agents, and return the ends of those that have ended."""
        return [self._asked(*each) for each in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Future[StepResult] | None]) -> None:
        """End agents that are at work, with all that they have started."""
        for state in states:
            if state is not None:
                state.cancel()

    def _asked(self, conversation: Conversation, playing: Future[StepResult] | None) -> StepResult | EnvironmentFailure:
        if playing is None:
            if conversation.agent_run is None:
                raise UnusableAnswer("it runs agents and does not score responses; set `agent: {place: environment}`")
            if missing := sorted({"taskset", "task"} - set(conversation.info)):
                raise UnusableAnswer(
                    f"the prompt's info lacks {missing}; prompts of verifiers must come from the dataset verifiers"
                )
            playing = asyncio.run_coroutine_threadsafe(self._play(conversation, conversation.agent_run), self._loop)
        if not playing.done():
            return StepResult(done=False, observation=_AT_WORK, state=playing)
        try:
            return playing.result()
        except AgentLost as error:
            return EnvironmentFailure(str(error), "process")
        except CancelledError:
            return EnvironmentFailure("the agent was ended", "process")

    async def _play(self, conversation: Conversation, agent: AgentRun) -> StepResult:
        if agent.is_out_of_reach:
            problem = f"the policy is served at {agent.host}, a loopback address of another node than the environment's"
            return StepResult(info={AGENT_FAILURE: f"{problem}; set agent.host to an address that others reach"})
        with tempfile.TemporaryDirectory(prefix="rl-verifiers-") as scratch:
            log = Path(scratch, "output.log")
            try:
                prompt = {"id": conversation.id, "info": dict(conversation.info)}
                launcher = self._launcher(conversation.info["taskset"])
                found = await launcher.play(prompt, agent.variables_at(agent.host), log)
                if not isinstance(found, dict):
                    raise AgentFailed("its process ended before it gave a reward")
            except AgentLost:
                raise
            except Exception as error:  # noqa: BLE001 - a failure becomes a report of this rollout
                name = "" if isinstance(error, AgentFailed) else f"{type(error).__name__}: "
                reason = f"{name}{error}".replace(f"; its output is in {log}", "")
                return StepResult(info={AGENT_FAILURE: reason[:2000], AGENT_OUTPUT: _tail(log)})
        agents = found.get("agents", {})
        return StepResult(found if not agents else {}, agent_rewards=agents, info={AGENT_OUTPUT: ""})

    def _launcher(self, taskset: Mapping[str, Any]) -> ProcessLauncher:
        """Return the processes of a taskset."""
        key = json.dumps(taskset, sort_keys=True)
        if key not in self._launchers:
            self._launchers[key] = ProcessLauncher(self._agent(taskset), (), {}, GRACE_S)
        return self._launchers[key]

    def _agent(self, taskset: Mapping[str, Any]) -> AgentFunction:
        return VerifiersAgent(taskset, self._config.config)


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - MAX_OUTPUT))
            return file.read(MAX_OUTPUT).decode(errors="replace")
    except OSError:
        return ""
