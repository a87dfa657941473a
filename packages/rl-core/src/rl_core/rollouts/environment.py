"""Environments, which answer and reward a policy's turns, and agents that an environment runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

import numpy as np

from rl_core.rollouts.rollout import Message
from rl_core.rollouts.thoughts import final_text

AGENT_FAILURE = "agent_failure"
"""Name in `StepResult.info` of why an agent failed, a string; its rollout then has no reward."""
AGENT_OUTPUT = "agent_output"
"""Name in `StepResult.info` of what an agent wrote to its stdout and stderr, a string."""


@dataclass(frozen=True)
class AgentRun:
    """An agent that an environment runs instead of answering turns (`EnvironmentPlugin.runs_agents`).

    The environment starts it at the first turn and returns a state. It is asked again, with the same conversation,
    until its answer is done, which has the reward; if it is closed before, the agent ends.

    Args:
        command: Command of the agent; empty for the environment's own (`EnvironmentPlugin.brings_agent`).
        files: The agent's own files, by name; an argument of the command that equals one of these names becomes the
            file's path.
        variables: Environment variables that the user sets.
        root_url: URL of the rollout, as Anthropic's clients take it.
        api_key: Key of the rollout.
        network: Identifier of the network where `root_url` is a loopback address (`this_network`).
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    variables: Mapping[str, str]
    root_url: str
    api_key: str = field(repr=False)
    network: str = ""

    @property
    def host(self) -> str:
        """Name or IP address of the server."""
        return urlsplit(self.root_url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port of the server."""
        return urlsplit(self.root_url).port or 80

    @property
    def is_out_of_reach(self) -> bool:
        """Return whether the server has a loopback address of another machine than this process."""
        is_loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return is_loopback and self.network != this_network()

    def variables_at(self, host: str) -> dict[str, str]:
        """Return the environment variables of the agent, for a server that it reaches at another host and the same
        port."""
        root_url = f"http://{host}:{self.port}{urlsplit(self.root_url).path}"
        return {**service_variables(root_url, self.api_key), **self.variables}


def service_variables(root_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables that lead clients of OpenAI and Anthropic to a rollout.

    Args:
        root_url: URL of the rollout, as Anthropic's clients take it.
        api_key: Key of the rollout.
    """
    return {
        "OPENAI_BASE_URL": f"{root_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_API_KEY": api_key,
    }


def this_network() -> str:
    """Identify the network of this process: two processes reach the same loopback addresses if it is the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the policy.

    Args:
        name: Name of the tool; empty if the call has none.
        arguments: Arguments by name.
        id: Id of the call in its turn; the message with its result has it as `tool_call_id`.
        error: The reason that the call cannot be read; empty if it can. An environment answers it as an observation.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str = ""


@dataclass(frozen=True)
class TrainerState:
    """Progress of the training when a turn was sampled.

    Args:
        global_step: Number of steps that the weights which sampled the turn had been trained for; 0 outside training.
        max_steps: Number of steps of the whole run; 1 outside training, so that shares of it can be computed.
    """

    global_step: int = 0
    max_steps: int = 1


@dataclass(frozen=True)
class Resumption:
    """A conversation that was answered before and resumes in a process that does not know it.

    Args:
        saved: State after the turn before the newest, as `SavingEnvironment.save` gave it; None if the conversation had
            no state then.
    """

    saved: bytes | None = None


@dataclass(frozen=True)
class KeptState:
    """State of a conversation as everyone sees it but the environment's process, which keeps it.

    Args:
        saved: The state as bytes (`SavingEnvironment.save`), which only an environment's process reads; None if the
            environment did not save it.
    """

    saved: bytes | None = None


_PLAIN = ("completion", "truncated", "turn", "num_prompt_messages", "is_text", "opened_thoughts", "agent", "seed")
"""Fields of a `Conversation` that are plain values."""


@dataclass(frozen=True)
class Conversation:
    """A rollout as an environment sees it.

    Args:
        id: Stable over the turns of one rollout; one that has a state stays with the process which keeps it.
        messages: Prompt, completions and observations so far; the last is the policy's newest turn.
        info: Info of the prompt (the answer, a seed).
        completion: Text of the newest turn.
        truncated: True if the newest turn ran into the token limit.
        turn: Number of the policy's turns before the newest.
        tool_calls: Tool calls of the newest turn, if the environment has tools.
        completion_ids: Int32 `[tokens]`, the tokens of the newest turn, including the stop token and tokens that ended
            its thoughts by force. A rollout worker fills them in, as it does the following fields; None elsewhere. When
            a reward is tried before a run, they are the bytes of the text.
        num_prompt_messages: Number of the first messages that are the prompt; None for all before the newest turn.
        is_text: True if the row gave the prompt as plain text, which became the one message of the prompt.
        trainer_state: Progress of the training when the newest turn was sampled.
        opened_thoughts: Mark of the newest turn's prompt that opened thoughts, such as `<think>`; empty if there is
            none.
        agent: Name of the agent that took the newest turn, if the play has several; `messages` are what it has seen.
            Empty for the only one.
        agent_run: The agent that the environment runs instead of scoring a turn; None if it does not run one.
        seed: Seed of the conversation, equal in every turn and whenever the rollout runs again; it follows from the
            rollout's seed. 0 if an environment is tried outside a run.
        resumption: State to resume from, for a pool that does not have the conversation; an environment sees None.
    """

    id: str
    messages: tuple[Message, ...]
    info: Mapping[str, Any]
    completion: str
    truncated: bool = False
    turn: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    completion_ids: np.ndarray | None = field(default=None, compare=False)
    num_prompt_messages: int | None = None
    is_text: bool = False
    trainer_state: TrainerState = TrainerState()
    opened_thoughts: str = ""
    agent: str = ""
    agent_run: AgentRun | None = None
    seed: int = 0
    resumption: Resumption | None = field(default=None, compare=False)

    def plain(self) -> dict[str, Any]:
        """Return it as values that JSON has, without the prompt's info, for `from_plain`."""
        ids = self.completion_ids
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "messages": [dict(message) for message in self.messages],
            "tool_calls": [asdict(call) for call in self.tool_calls],
            "completion_ids": None if ids is None else ids.tolist(),
            "trainer_state": asdict(self.trainer_state),
        }

    @classmethod
    def from_plain(cls, id: str, info: Mapping[str, Any], values: Mapping[str, Any]) -> Conversation:
        """Return the conversation of values that `plain` gave.

        Args:
            id: Its id, unique among those in progress.
            info: Info of the prompt.
            values: The values.
        """
        ids = values["completion_ids"]
        return cls(
            id=id,
            info=info,
            messages=tuple(values["messages"]),
            tool_calls=tuple(ToolCall(**call) for call in values["tool_calls"]),
            completion_ids=None if ids is None else np.asarray(ids, dtype=np.int32),
            trainer_state=TrainerState(**values["trainer_state"]),
            **{name: values[name] for name in _PLAIN},
        )

    @property
    def final_text(self) -> str:
        """Text of the newest turn after its last thoughts, which is what is graded; empty if they do not end."""
        return final_text(self.completion, self.opened_thoughts)

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages of the prompt."""
        return self.messages[: self._num_prompt_messages]

    @property
    def completion_messages(self) -> tuple[Message, ...]:
        """The messages after the prompt: the policy's turns, and the observations between them."""
        said = self.messages[self._num_prompt_messages :]
        return said or ({"role": "assistant", "content": self.completion},)

    @property
    def _num_prompt_messages(self) -> int:
        return max(len(self.messages) - 1, 0) if self.num_prompt_messages is None else self.num_prompt_messages


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one turn.

    Args:
        reward: A float, or rewards by name: `reward` is trained on (their sum if it is absent). An empty mapping means
            that the reward does not apply: the turn earns 0, and a sum of several rewards leaves it out.
        done: True if the rollout ends here.
        observation: Messages to append before the next turn; needed unless done.
        state: Handed back at the next turn; any object, as it stays in the environment's process. Elsewhere it is a
            `KeptState`, or None if there is none.
        stop_strings: Stop strings for the next turn, None to keep the configured ones.
        max_new_tokens: Maximum number of tokens of the next turn, None for as many as configured; never more than
            those.
        info: Reported with the rollout; numbers are averaged into metrics.
        agent: Name of the agent that took this turn, if the play has several. The first answer gives it, later ones may
            leave it out. Empty for the only one.
        next_agent: Name of the agent that takes the next turn, such as the other player of a game: `observation` is
            added to what this agent has seen, and is all of it before its first turn. Empty for the agent that took
            this one.
        agent_rewards: Rewards of other agents by agent, each a float or rewards by name; `reward` is for the agent that
            took this turn. Rewards of an agent without a turn yet are dropped, as it has nothing to train on.
    """

    reward: float | Mapping[str, float] = 0.0
    done: bool = True
    observation: tuple[Message, ...] = ()
    state: Any = None
    stop_strings: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    agent: str = ""
    next_agent: str = ""
    agent_rewards: Mapping[str, float | Mapping[str, float]] = field(default_factory=dict)

    def rewards(self) -> dict[str, float]:
        """Rewards by name, `reward` always among them."""
        if not isinstance(self.reward, Mapping):
            return {"reward": float(self.reward)}
        named = {name: float(value) for name, value in self.reward.items()}
        return named if "reward" in named else {**named, "reward": float(sum(named.values()))}


Fault = Literal["raised", "signature", "answer", "deadline", "process", "lost", "budget"]
"""Kind of a failure: the environment raised, and may answer other conversations; it asks for a field that a row does
not have; it answered in another form than it should; it passed its deadline; its process or a service that it needs
(`rl_core.errors.InfrastructureFailed`) ended or cannot be reached; nobody has the state of the conversation, which can
resume from a saved one; or the budget of a judge that it asked is spent, which ends the run.
"""


@dataclass(frozen=True)
class EnvironmentFailure:
    """A conversation's outcome, instead of a `StepResult`, if its environment raised, crashed or passed its deadline.

    An environment may also return one itself, for a conversation that it cannot answer: its rollout fails, and the
    others of the call continue.

    Args:
        reason: Reason in one line, naming the environment; the rollout fails with it.
        fault: Kind of the failure.
    """

    reason: str
    fault: Fault = "process"


class UnusableAnswer(ValueError):
    """Raised if an environment returns an answer in the wrong form."""


class MissingField(UnusableAnswer):
    """Raised if an environment asks for a field that a row does not have."""


class Environment(Protocol):
    """Scores and answers conversations in batches of up to `env.<name>.max_batch`; runs in its own processes."""

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> Sequence[StepResult | EnvironmentFailure]:
        """Return one result per conversation, in order; `states` are None on the first turn."""

    def close(self, states: Sequence[Any]) -> None:
        """Free what the states of unfinished conversations hold."""


@runtime_checkable
class SavingEnvironment(Environment, Protocol):
    """An environment whose conversations outlive its process: their states are saved after every turn.

    Both methods are called in the environment's processes. The bytes are opaque to everyone else: they are kept with
    the turns of the rollout and in checkpoints, and come back only to a process of the same environment. Anyone who can
    write a run's checkpoints can write these bytes, so read them as data (JSON, msgpack) and don't unpickle them.
    """

    def save(self, states: Sequence[Any]) -> Sequence[bytes | None]:
        """Return each state as bytes, in order; None for a state that cannot be saved at this turn.

        Called after each step with the states of conversations that continue, which must not change.
        """

    def restore(self, saved: Sequence[bytes]) -> Sequence[Any]:
        """Return the states of these bytes, in order, so that conversations answer from them as from the saved ones.

        They are closed as others are (`close`). The saved states may still be in use elsewhere.
        """
