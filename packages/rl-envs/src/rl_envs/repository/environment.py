"""The environment `repository`, and its checks of rows and of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.rollouts.environment import (
    AGENT_FAILURE,
    AGENT_OUTPUT,
    Conversation,
    EnvironmentFailure,
    StepResult,
    UnusableAnswer,
)
from rl_envs.repository.job import AgentJob
from rl_envs.repository.plugin import RepositoryConfig
from rl_envs.repository.task import check_source, read_task
from rl_envs.repository.working_copy import Repositories
from rl_envs.sandbox.config import row_image
from rl_envs.sandbox.sandbox import machine_problem, open_sandbox

SHOWN = 300
"""Maximum number of characters of a problem, and of the paths of ignored files, that are reported."""
MAX_OUTPUT = 2**18
"""Maximum number of characters of an agent's output that are reported, from its end."""
_AT_WORK = ({"role": "user", "content": "The agent is at work."},)


class RepositoryEnvironment:
    """Runs an agent for each conversation, and scores the working copies that they leave.

    The state of a conversation is its agent at work; closing it ends the agent.

    Raises:
        SandboxUnavailable: If the machine does not offer the sandbox that the settings ask for.
    """

    def __init__(self, config: RepositoryConfig) -> None:
        self._config = config
        self._runner = open_sandbox(config.sandbox)
        self._repositories = Repositories(config.sandbox.scratch_mib * 2**20)

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[AgentJob | None]
    ) -> list[StepResult | EnvironmentFailure]:
        return [self._asked(*each) for each in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[AgentJob | None]) -> None:
        for state in states:
            if state is not None:
                state.end()

    def _asked(self, conversation: Conversation, job: AgentJob | None) -> StepResult | EnvironmentFailure:
        if job is None:
            if conversation.agent_run is None:
                raise UnusableAnswer("it runs agents and does not score responses; set `agent: {place: environment}`")
            row_image(conversation.info, self._config.sandbox)
            task = read_task(conversation.info, Path(self._config.folder))
            # The rest of the row may have the solution.
            prompt = {"id": conversation.id, "messages": list(conversation.messages), "info": {}, "tools": []}
            job = AgentJob(conversation.agent_run, task, prompt, self._runner, self._repositories, self._config)
        result = job.result
        if result is None:
            return StepResult(done=False, observation=_AT_WORK, state=job)
        if result.is_infrastructure:
            return EnvironmentFailure(result.failure, "process")
        told = {AGENT_FAILURE: result.failure, AGENT_OUTPUT: result.output[-MAX_OUTPUT:], "ended": result.ended}
        if result.score is None:
            return StepResult(info=told)
        share = result.score.num_passed / result.score.num_tests
        passed = float(share == 1.0)
        reward = {"reward": share if self._config.reward == "share" else passed, "passed": passed}
        ignored = ", ".join(result.ignored)[:SHOWN]
        return StepResult(reward=reward, info={**told, "problem": result.score.problem[:SHOWN], "ignored": ignored})


def check_row(info: Mapping[str, Any], config: RepositoryConfig) -> None:
    """Raise a `ValueError` if the row has no repository that is there, or no tests."""
    row_image(info, config.sandbox)
    check_source(read_task(info, Path(config.folder)))


def check_machine(config: RepositoryConfig) -> str:
    """Return why agents cannot run by the settings, and what to do; an empty string if they can."""
    return machine_problem(config.sandbox)
