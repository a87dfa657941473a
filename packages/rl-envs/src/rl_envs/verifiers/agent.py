"""An agent of verifiers as a function of the policy's address: one episode of a task, and its rewards."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rl_core.rollouts.environment import service_variables
from rl_envs.verifiers.imports import CHAT, importable_id

MAX_VALUES = 100
"""Maximum number of values by name that are reported of one agent."""

_KEY = "RL_POLICY_KEY"
"""Environment variable of the rollout's key, which verifiers reads by its name."""


@dataclass(frozen=True)
class VerifiersAgent:
    """Plays tasks of one taskset. Its environment is built once, and the process of each rollout begins with it.

    Args:
        taskset: Configuration of the taskset.
        config: Configuration of the environment without it.
    """

    taskset: Mapping[str, Any]
    config: Mapping[str, Any]

    def load(self) -> Callable[[str, str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]:
        """Return the function of an agent; imports verifiers and the taskset.

        Raises:
            ValueError: If verifiers refuses the configuration.
        """
        import verifiers.v1 as vf

        environment = vf.load_environment(vf.resolve_env_config(self._with_defaults()))
        task_class = type(environment.taskset).task_type()
        # Judges of the task may need the variables that the rollout's address is given in.
        own = {name: os.environ.get(name) for name in service_variables("", "")}

        async def run(base_url: str, api_key: str, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
            os.environ |= {_KEY: api_key, **{name: value for name, value in own.items() if value is not None}}
            for name in own.keys() - {name for name, value in own.items() if value is not None}:
                os.environ.pop(name, None)
            seats = [name for name, value in environment.config if isinstance(value, vf.AgentConfig)]
            if len(seats) > 1:
                environment.config = _at_own_urls(environment.config, seats, base_url)
            data = task_class.data_type().model_validate(prompt["info"]["task"])
            task = task_class(data, environment.taskset.config.task)
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY)
            async with environment.serving():
                (slot,) = environment.slots(task)
                episode = await environment.run_slot(slot, vf.ModelContext(model="policy", client=client))
            if not episode.ok:
                errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
                reasons = [f"{error.type}: {' '.join(error.message.split())[:500]}" for error in errors]
                # The last lines of the output are the reason of the failure; a traceback of this file would hide it.
                sys.stderr.write("; ".join(reasons) or "the episode did not complete")
                raise SystemExit(1)
            if len(seats) == 1:
                return values_of(episode.traces)
            return {"agents": {name: values_of(traces) for name, traces in episode.by_agent.items()}}

        return run

    def _with_defaults(self) -> dict[str, Any]:
        """Return the configuration of the environment, with a harness and a runtime for each agent."""
        import verifiers.v1 as vf

        taskset = {**self.taskset, "id": importable_id(self.taskset["id"])}
        config = {**self.config, "taskset": taskset, "id": importable_id(self.config.get("id") or "")}
        kind = vf.env_config_type(taskset["id"], config["id"])
        has_harness = vf.default_harness_id(taskset["id"]) != "bash"
        for name, field in kind.model_fields.items():
            default = field.default
            if not isinstance(default, vf.AgentConfig):
                continue
            agent = dict(config.get(name) or {})
            if default.harness is None and not has_harness:
                # Verifiers would run the shell commands of the policy on this machine.
                agent.setdefault("harness", {"id": CHAT})
            if (harness := agent.get("harness")) is not None and "id" in harness:
                agent["harness"] = {**harness, "id": importable_id(harness["id"])}
            if "runtime" not in default.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            config[name] = agent
        return config


def values_of(traces: Sequence[Any]) -> dict[str, float]:
    """Return the mean reward of an agent's traces, and the means of their rewards and metrics by name.

    Raises:
        ValueError: If a reward is not finite.
    """
    named: dict[str, list[float]] = {}
    for trace in traces:
        found = {name: value for name, value in trace.metrics.items() if value is not None}
        found |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        found["reward"] = trace.reward
        for name, value in found.items():
            if not math.isfinite(value):
                raise ValueError(f"the taskset gave {name} the value {value}; it must be a finite number")
            named.setdefault(name[:MAX_VALUES], []).append(float(value))
    rewards = {"reward": named.pop("reward"), **dict(list(named.items())[: MAX_VALUES - 1])}
    return {name: fmean(values) for name, values in rewards.items()}


def _at_own_urls(config: Any, seats: Sequence[str], base_url: str) -> Any:
    """Return the configuration of several agents, each with its own part of the rollout."""
    import verifiers.v1 as vf

    root, own = base_url.removesuffix("/v1"), {}
    for name in seats:
        seat = getattr(config, name)
        if seat.client is None:
            client = vf.EvalClientConfig(base_url=f"{root}/agents/{name}/v1", api_key_var=_KEY)
            own[name] = seat.model_copy(update={"client": client})
    return config.model_copy(update=own)
