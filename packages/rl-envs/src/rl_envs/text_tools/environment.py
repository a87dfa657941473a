"""The `text_tools` environment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.rollout import Message
from rl_envs.math.extraction import extract
from rl_envs.math.known_answer import known_answers
from rl_envs.math.verdict import is_correct
from rl_envs.sandbox.sandbox import Sandbox
from rl_envs.sandbox.session import Session
from rl_envs.text_tools.calculator import calculate
from rl_envs.text_tools.config import TextToolsConfig
from rl_envs.text_tools.corpus import Corpus
from rl_envs.text_tools.schemas import DESCRIBED

_LIFETIME_S = 3600.0
"""Maximum number of seconds of a Python session; those of a call are in the settings."""


@dataclass(frozen=True)
class Progress:
    """A conversation under way.

    Args:
        num_calls: Calls so far.
        session: Its Python; None before the first call.
    """

    num_calls: int = 0
    session: Session | None = None


class TextToolsEnvironment:
    """Answers the calls of a turn with the tools' output, and scores a turn without one.

    Of calls by tags, only the first of a turn counts, and none that the token limit cut off.

    Raises:
        SandboxUnavailable: If Python is a tool and the machine does not offer its sandbox.
        DataError: If the corpus cannot be read.
    """

    def __init__(self, config: TextToolsConfig) -> None:
        self._config = config
        self._tagged = re.compile(rf"<({'|'.join(config.tools)})>(.*?)(?:</\1>|$)", re.DOTALL)
        limits = replace(config.sandbox.limits, wall_s=_LIFETIME_S)
        isolation, path = config.sandbox.isolation, config.sandbox.python_path
        self._sandbox = Sandbox(isolation, limits=limits, python_path=path) if "python" in config.tools else None
        self._corpus = Corpus(config.corpus) if "search" in config.tools and config.corpus else None

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._turn(turn, state or Progress()) for turn, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        for state in states:
            if state.session is not None:
                state.session.close()

    def save(self, states: Sequence[Progress]) -> list[bytes | None]:
        """The calls so far: those of Python run again in the session of the restored conversation."""
        return [_saved(state) for state in states]

    def restore(self, saved: Sequence[bytes]) -> list[Progress]:
        """Conversations as they were saved, each with a new session that has run their code."""
        return [self._restored(json.loads(data)) for data in saved]

    def _restored(self, state: Mapping[str, Any]) -> Progress:
        if state["session"] is None or self._sandbox is None:
            return Progress(state["num_calls"])
        return Progress(state["num_calls"], Session.restore(self._sandbox, state["session"].encode()))

    def _turn(self, turn: Conversation, progress: Progress) -> StepResult:
        known = known_answers(turn.info, self._config.answer_format)
        calls = self._calls(turn)
        if not calls or progress.num_calls >= self._config.max_calls:
            self.close([progress])
            found = None if calls else extract(turn.final_text, known.answer_format)
            correct = found is not None and any(
                is_correct(found.text, answer, known.answer_format) for answer in known.answers
            )
            return StepResult(reward=float(correct), info={"accuracy": float(correct), "calls": progress.num_calls})
        session = progress.session
        if session is None and self._sandbox is not None and any(call.name == "python" for call in calls):
            session = Session(self._sandbox, seed=turn.seed)
        num_calls, most = progress.num_calls + len(calls), self._config.max_calls
        outputs = [
            self._output(call, session) if number <= most else f"error: the limit of {most} calls is reached"
            for number, call in enumerate(calls, progress.num_calls + 1)
        ]
        return StepResult(
            done=False,
            observation=tuple(map(self._message, calls, outputs)),
            state=Progress(num_calls, session),
            stop_strings=self.stop_strings,
            info={"calls": num_calls},
        )

    def _calls(self, turn: Conversation) -> Sequence[ToolCall]:
        if self._config.call_format == "model":
            return () if turn.truncated else turn.tool_calls
        found = self._tagged.search(turn.final_text or turn.completion)
        # a stop string may have ended the turn at a call in thoughts, which do not end then
        if found is not None and not turn.final_text and found.end() < len(turn.completion.rstrip()):
            return ()
        if found is None or (turn.truncated and not found[0].endswith(f"</{found[1]}>")):
            return ()
        name, text = found[1], found[2].strip()
        return (ToolCall(name, {DESCRIBED[name].parameter: text}),)

    def _message(self, call: ToolCall, output: str) -> Message:
        output = self._shortened(output)
        if self._config.call_format == "model":
            return {"role": "tool", "name": call.name, "content": output, "tool_call_id": call.id}
        return {"role": "user", "content": f"<result>\n{output}\n</result>"}

    def _output(self, call: ToolCall, session: Session | None) -> str:
        if call.error:
            return f"error: the call cannot be read: {call.error}"
        if call.name not in self._config.tools:
            return f"error: there is no tool {call.name!r}; the tools are {', '.join(self._config.tools)}"
        parameter = DESCRIBED[call.name].parameter
        text = call.arguments.get(parameter)
        if not isinstance(text, str) or len(call.arguments) != 1:
            got = ", ".join(name[:40] for name in list(call.arguments)[:4]) or "nothing"
            return f"error: {call.name} takes one text, as {parameter!r}; got {got}"
        return self._tools(session)[call.name](text)

    @property
    def stop_strings(self) -> tuple[str, ...] | None:
        """Ends of calls by tags, at which a turn is over; None for calls that the model ends by itself."""
        return tuple(f"</{tool}>" for tool in self._config.tools) if self._config.call_format == "tags" else None

    def _tools(self, session: Session | None) -> Mapping[str, Callable[[str], str]]:
        return {
            "calculator": calculate,
            "python": lambda code: _python(session, code, self._config.sandbox.wall_s),
            "search": self._search,
        }

    def _search(self, query: str) -> str:
        assert self._corpus is not None
        found = self._corpus.search(query, self._config.num_results)
        return "\n\n".join(f"{title}\n{text}".strip() for title, text in found) or "nothing was found"

    def _shortened(self, output: str) -> str:
        most = self._config.max_output
        if len(output) <= most:
            return output
        return f"{output[: most // 2]}\n[{len(output) - most} characters left out]\n{output[len(output) - most // 2 :]}"


def _saved(progress: Progress) -> bytes | None:
    if progress.session is None:
        return json.dumps({"num_calls": progress.num_calls, "session": None}).encode()
    session = progress.session.save()
    return session and json.dumps({"num_calls": progress.num_calls, "session": session.decode()}).encode()


def _python(session: Session | None, code: str, timeout_s: float) -> str:
    assert session is not None
    return session.execute(code, timeout_s=timeout_s).rstrip() or "(no output)"
