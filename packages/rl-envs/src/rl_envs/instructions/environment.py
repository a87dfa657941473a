"""The `instructions` environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.instructions.checks import is_followed
from rl_envs.instructions.config import InstructionsConfig


class InstructionsEnvironment:
    """Scores a single turn by the instructions of its row."""

    def __init__(self, config: InstructionsConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        asked = _instructions(conversation.info)
        try:
            followed = [is_followed(name, conversation.completion, arguments) for name, arguments in asked]
        except ValueError as error:
            raise UnusableAnswer(str(error)) from None
        share = sum(followed) / len(followed)
        strict = float(all(followed))
        missed = [name for (name, _), done in zip(asked, followed, strict=True) if not done]
        reward = share if self._config.reward == "share" else strict
        return StepResult(reward=reward, info={"accuracy": strict, "followed": share, "missed": ", ".join(missed)})


def _instructions(info: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    names, arguments = info.get("instruction_id_list"), info.get("kwargs")
    if not names or not isinstance(names, list | tuple):
        fields = ", ".join(sorted(map(str, info))) or "none"
        raise UnusableAnswer(f"the row needs the list `instruction_id_list`; its fields are {fields}")
    arguments = [{}] * len(names) if arguments is None else arguments
    if len(arguments) != len(names):
        raise UnusableAnswer(f"the row has {len(names)} instructions and {len(arguments)} entries of `kwargs`")
    return [(str(name), each or {}) for name, each in zip(names, arguments, strict=True)]
