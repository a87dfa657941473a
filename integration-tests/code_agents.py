"""A scripted policy behind the endpoint that agents call, and the environment `repository` that runs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl_algos.agents.program import AgentProgram
from rl_algos.rollouts.config import AgentConfig
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.tiny_model import END, make_tokenizer
from rl_core.environments.pool import EnvironmentPool
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, WeightSpan
from rl_envs.repository.plugin import RepositoryConfig

TOKENIZER = make_tokenizer()


class ScriptedPolicy:
    """The `GenerationClient` of one rollout.

    Args:
        reply: Gives the text of a completion from the text before it.
        pool: Runs the environment.
    """

    sampling = SamplingParams(200)

    def __init__(self, reply: Callable[[str], str], pool: EnvironmentPool) -> None:
        self._reply, self._pool, chat = reply, pool, Chat(TOKENIZER)
        self.characters_per_token = chat.characters_per_token
        self.read, self.rendered, self.continuation = chat.read, chat.rendered, chat.continuation
        self.encoded, self.shown, self.pieces = chat.encoded, chat.shown, chat.pieces
        self._opened: set[str] = set()

    def on_failure(self, played: Callable[[], Sequence[Rollout]]) -> None:
        """See `GenerationClient`; failures are raised here."""

    async def generate(
        self, token_ids: np.ndarray, sampling: SamplingParams | None = None, *, draw: int | None = None
    ) -> Completion:
        ids = self.encoded(self._reply(self.shown(token_ids)) + END)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), "stop", (WeightSpan(1, len(ids)),))

    async def step(self, conversation: Conversation) -> StepResult:
        self._opened.add(conversation.id)
        [result] = await self._pool.step([conversation])
        if isinstance(result, EnvironmentFailure):
            raise RuntimeError(result.reason)
        return result

    async def abandon(self) -> None:
        """Give up what the environment still has of the rollout, as a rollout worker does at its end."""
        await self._pool.abandon(self._opened)


class Stage:
    """Plays rollouts of an agent in one environment.

    Args:
        pool: The environment.
        logs: Folder of logs.
    """

    def __init__(self, pool: EnvironmentPool, logs: Path) -> None:
        self.pool, self.logs = pool, logs

    @asynccontextmanager
    async def agent(self, source: str) -> AsyncIterator[AgentProgram]:
        """An agent that is a file of Python."""
        config = AgentConfig(place="environment", command=["python", "agent.py"], files=["agent.py"])
        program = AgentProgram(config=config, function=None, max_tokens=4000, files={"agent.py": source.encode()})
        await program.start(self.logs)
        try:
            yield program
        finally:
            await program.close()

    async def play(
        self,
        program: AgentProgram,
        name: str,
        issue: str,
        info: Mapping[str, Any],
        reply: Callable[[str], str],
        *,
        deadline_s: float = 240.0,
    ) -> Rollout | Exception:
        """One rollout, or the reason that there is none."""
        tokens = np.array(TOKENIZER.encode(issue), np.int32)
        prompt = Prompt(name, ({"role": "user", "content": issue},), tokens, "repository", info)
        policy = ScriptedPolicy(reply, self.pool)
        try:
            return await asyncio.wait_for(program.run(prompt, policy), deadline_s)
        except Exception as error:  # noqa: BLE001 - a rollout that fails is a result
            return error
        finally:
            await policy.abandon()

    def output(self, name: str) -> str:
        """All that the agents of a prompt wrote."""
        return "".join(log.read_text() for log in sorted((self.logs / "agents").glob(f"{name}-*.log")))


@asynccontextmanager
async def stage(logs: Path, sandbox: Mapping[str, Any]) -> AsyncIterator[Stage]:
    """The environment, with these settings of its sandbox."""
    config = RepositoryConfig.model_validate({"sandbox": sandbox, "reward": "all"})
    pool = EnvironmentPool.of("rl_envs.repository.environment:RepositoryEnvironment", config, "repository")
    await pool.start()
    try:
        yield Stage(pool, logs)
    finally:
        await pool.close()


ASK = """
import json, os, sys, urllib.error, urllib.request
prompt = json.load(open(os.environ["RL_PROMPT_FILE"]))
issue = prompt["messages"][0]["content"]

def post(url, key, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)

def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, os.environ["OPENAI_API_KEY"], {"messages": messages})["choices"][0]["message"]["content"]
"""
"""The beginning of an agent."""


def repository_of(**files: str) -> dict[str, str]:
    """Files of a repository, by names without `.py`."""
    return {f"{name}.py": text for name, text in files.items()}


def written(info: Mapping[str, Any]) -> str:
    """An info as JSON, to be compared."""
    return json.dumps(info, sort_keys=True)
