"""Settings of agents: programs that call the policy over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import Config, EnvVars, PathText, Problem, ProblemError, WhenChanged

SCORED_BY_AGENT = "agent"
"""Name of the environment of prompts whose rewards come from an agent; there is no such environment."""

_LEASE_S = 300.0


class AgentConfig(Config):
    """An agent that calls the policy over HTTP: a function, a command or a program elsewhere."""

    run: PathText | None = None
    """Function that plays one rollout, as `file.py:function` or `package.module:function`. It is called as
    `run(base_url, api_key, prompt)` in a process of its own for each rollout, may be `async`, and returns the reward: a
    number, or numbers by name."""
    command: list[str] = []
    """Command that plays one rollout, such as `[python, agent.py]`, started for each. It finds the policy in
    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, its task in the JSON file
    `RL_PROMPT_FILE`, and writes its reward, a number or numbers by name, as JSON to `RL_REWARD_FILE`."""
    external: bool = False
    """Let agents that run elsewhere take rollouts: `POST /rollouts` answers with a prompt, a URL and keys, and
    `POST /rollouts/ID/v1/end` ends the rollout. The log shows the address; the key is in a file in `logs/agents` of the
    run directory. A rollout waits for an agent, and for its end, as long as `max_rollout_seconds` allows."""
    lease_s: Annotated[float, WhenChanged.RESUME] = Field(default=_LEASE_S, gt=0)
    """Seconds without a call after which an external agent loses the rollout that it took: the next agent that asks
    gets it, from its beginning. Any request with one of the rollout's keys begins the time anew, such as
    `POST /rollouts/ID/v1/renew` while the agent does other work. The time does not run while a call is answered."""
    reward: Literal["returned", "posted", "environment"] = "returned"
    """Where rewards come from. `returned`: the function's result, or the command's reward file. `posted`: only
    `POST /rollouts/ID/v1/reward` with the key in `RL_REWARD_KEY`, for rewards of single calls or of a judge's.
    `environment`: the environment of the prompt scores the conversation that the agent ends with; the agent itself has
    no say in it. Always `environment` with `place: environment`."""
    place: Literal["process", "environment"] = "process"
    """Where `command` runs. `process`: in a process next to the rollout worker, with its files and its network.
    `environment`: the environment of the prompt runs it, such as `repository` in a sandbox, and scores what it leaves;
    of the rollout worker's environment variables it has none."""
    files: list[PathText] = []
    """Files that `command` needs with `place: environment`, such as `[agent.py]` for `[python, agent.py]`, or modules
    as `package.module`. Their contents are sent. An argument of the command that is the name of one stands for it."""
    env: EnvVars = {}
    """Environment variables of the function or the command, in addition to those of the rollout worker."""
    max_calls: int = Field(default=64, gt=0)
    """Maximum number of completions in one rollout; further calls are refused."""
    host: str = "127.0.0.1"
    """Address at which the policy is served. Agents on other machines need one of the node's own addresses."""
    grace_s: Annotated[float, WhenChanged.RESUME] = Field(default=5.0, ge=0)
    """Seconds between SIGTERM and SIGKILL when an agent is stopped, after its rollout has ended or taken too long
    (`max_rollout_seconds`). All processes that it started are ended with it."""

    @model_validator(mode="before")
    @classmethod
    def _scored_where_it_runs(cls, written: Any) -> Any:
        """With `place: environment`, only the environment can give rewards."""
        if isinstance(written, Mapping) and written.get("place") == "environment" and "reward" not in written:
            return {**written, "reward": "environment"}
        return written

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        kinds = [name for name, is_given in self._kinds.items() if is_given]
        if len(kinds) != 1:
            raise ProblemError(
                Problem("", f"sets {' and '.join(kinds) or 'no agent'}", remedy=f"Set one of {', '.join(self._kinds)}")
            )
        if problem := self._place_problem:
            raise ProblemError(problem)
        if self.external and self.reward == "returned":
            raise ProblemError(
                Problem(
                    "reward",
                    "an agent that runs elsewhere returns nothing",
                    got=self.reward,
                    allowed="posted, environment",
                )
            )
        if self.lease_s != _LEASE_S and not self.external:
            raise ProblemError(
                Problem(
                    "lease_s",
                    "has no effect on an agent that the run starts",
                    got=self.lease_s,
                    is_unused=True,
                    remedy="Remove it, or set external: true; max_rollout_seconds limits the time of a rollout",
                )
            )
        if self.host in ("0.0.0.0", "::"):
            raise ProblemError(
                Problem(
                    "host",
                    "is not an address that agents can call",
                    got=self.host,
                    remedy="Set one of the node's own addresses",
                )
            )
        return self

    @property
    def needs_environment(self) -> bool:
        """Whether the environments of the prompts score the rollouts."""
        return self.reward == "environment"

    @property
    def scores_last_turn(self) -> bool:
        """Whether the environment scores the conversation that the agent ends with, rather than what the agent left."""
        return self.reward == "environment" and self.place == "process"

    @property
    def _place_problem(self) -> Problem | None:
        """A contradiction of `place` and other keys."""
        if self.place == "process":
            unused = Problem.unused("files", "with place=process", remedy="Remove it, or set place=environment")
            return unused if self.files else None
        if not self.command:
            return Problem("place", "runs a command", got=self.place, remedy="Set command, or place=process")
        if self.reward != "environment":
            return Problem(
                "reward", "is given by the environment with place=environment", got=self.reward, allowed="environment"
            )
        names = [Path(name).name for name in self.files]
        if double := next((name for name in names if names.count(name) > 1), None):
            return Problem("files", f"has two files with the name {double}", got=self.files, remedy="Rename one")
        return None

    @property
    def _kinds(self) -> dict[str, bool]:
        return {"run": self.run is not None, "command": bool(self.command), "external": self.external}
