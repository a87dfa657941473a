"""Conversations of several turns and tools that the chat template cannot carry, found before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from rl_algos.rollouts.config import (
    GeneratingPolicy,
    PolicyGradientConfig,
    RolloutConfig,
    RolloutRoot,
    rollout_config,
)
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.continuation import rewrites_history
from rl_algos.rollouts.worker.programs import DEFAULT_PROGRAM
from rl_algos.rollouts.worker.turn_ends import TurnEnds
from rl_algos.tokenizer import render, require_chat_template
from rl_algos.tool_calls.formats import FORMATS, PLAIN
from rl_core.errors import ConfigError
from rl_core.rollouts.rollout import Message

_log = logging.getLogger(__name__)

_ASKED: Message = {"role": "user", "content": "A question."}


def check_conversations(
    config: RolloutRoot, tokenizer: Any, tools: Mapping[str, Sequence[Mapping[str, Any]]]
) -> TurnEnds:
    """Render short conversations as rollouts of several turns, and of tools, do.

    Args:
        config: Resolved config of the run.
        tokenizer: Tokenizer of the policy.
        tools: Tools by environment; empty if none has any.

    Returns:
        The tokens that end a turn.

    Raises:
        ConfigError: Naming the key to change.
    """
    settings = rollout_config(config)
    turns, program = settings.max_rollout_turns, settings.rollout_program
    key = f"{settings.section}.max_rollout_turns"
    ends = check_turns(
        config.policy,
        tokenizer,
        tools,
        program=program,
        max_turns=turns,
        turns_key=key,
        renders_anew=settings.renders_anew,
    )
    _check_penalties(settings, Chat(tokenizer, config.policy.tokenizer.tool_format), has_tools=bool(tools))
    is_rendered = turns > 1 and program == DEFAULT_PROGRAM and settings.agent is None
    if is_rendered and settings.rewritten_history is None and rewrites_history(tokenizer, ends):
        raise ConfigError(
            f"{settings.section}.rewritten_history: the chat template renders earlier turns differently from how "
            "the policy writes them (such as without their thoughts). Set this key to `keep` to continue from the "
            "tokens as they were sampled, or to `split` to train on what the template renders for each turn, or set "
            "policy.tokenizer.chat_template to a template that only appends"
        )
    return ends


def check_turns(
    policy: GeneratingPolicy,
    tokenizer: Any,
    tools: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    program: str,
    max_turns: int,
    turns_key: str,
    renders_anew: bool,
) -> TurnEnds:
    """See `check_conversations`; for a model that does not train on what it says, so that its template may rewrite
    earlier turns.

    Args:
        policy: Config section of the model.
        tokenizer: Tokenizer of the model.
        tools: Tools by environment; empty if none has any.
        program: Name or path of the rollout program, as in `RolloutConfig.rollout_program`.
        max_turns: Maximum number of turns of a rollout.
        turns_key: Key of `max_turns`, for messages.
        renders_anew: True if the chat template renders the whole conversation for every turn.
    """
    require_chat_template(tokenizer)
    chat = Chat(tokenizer, policy.tokenizer.tool_format)
    _warn_of_plain_end(chat.ends, tokenizer, policy.generation.stop_strings)
    if tools:
        _check_tools(chat, tokenizer, max_turns, turns_key, tools)
    if max_turns > 1 and program == DEFAULT_PROGRAM:
        _check_continuation(chat, with_tools=bool(tools), renders_anew=renders_anew)
    return chat.ends


def _check_penalties(settings: RolloutConfig, chat: Chat, *, has_tools: bool) -> None:
    """Refuse penalties of the format of a turn that no turn, or every turn, would get."""
    if not isinstance(settings, PolicyGradientConfig) or not settings.reward_shaping.enabled:
        return
    key, shaping = f"{settings.section}.reward_shaping", settings.reward_shaping
    if shaping.invalid_tool_call_penalty and not has_tools and settings.agent is None:
        raise ConfigError(
            f"{key}.invalid_tool_call_penalty: got {shaping.invalid_tool_call_penalty:g}, but no environment of the "
            "prompts has tools, so no turn has a tool call. Set this key to 0, or use an environment with tools"
        )
    if shaping.malformed_thinking_penalty and chat.tool_format.reads_all:
        raise ConfigError(
            f"{key}.malformed_thinking_penalty: got {shaping.malformed_thinking_penalty:g}, but the policy writes its "
            "thoughts into a channel of its own, which has no closing mark. Set this key to 0"
        )


def _warn_of_plain_end(ends: TurnEnds, tokenizer: Any, stop_strings: Sequence[str]) -> None:
    """Warn if a turn ends with text that is not a token, so that a policy which writes it does not stop."""
    if ends.plain and not any(stop in ends.plain for stop in stop_strings):
        _log.warning(
            "the chat template ends a turn with %r, which is not a token of the tokenizer, so a turn ends only at %s. "
            "Set policy.generation.stop_strings: [%r], or set policy.tokenizer.name to a tokenizer that has the token",
            ends.plain,
            tokenizer.eos_token,
            ends.plain,
        )


def _check_tools(
    chat: Chat, tokenizer: Any, max_turns: int, turns_key: str, tools: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    name, schemas = next(iter(tools.items()))
    if max_turns < 2:
        raise ConfigError(
            f"{turns_key}: the environment {name} has tools, and the policy reads their results in a later turn; "
            "set this key to 2 or more"
        )
    if chat.tool_format is PLAIN:
        raise ConfigError(
            f"policy.tokenizer.tool_format: the environment {name} has tools, but the chat template does not show how "
            f"the model writes calls; set this key to one of {', '.join(FORMATS)}"
        )
    plain = render(tokenizer, [_ASKED], add_generation_prompt=True)
    if render(tokenizer, [_ASKED], add_generation_prompt=True, tools=schemas) == plain:
        _log.warning("the chat template does not show the tools of %s; the prompts must describe them", name)


def _check_continuation(chat: Chat, *, with_tools: bool, renders_anew: bool) -> None:
    said: Message = {"role": "assistant", "content": "An answer."}
    seams: list[tuple[Message, Message]] = [(said, _ASKED)]
    if with_tools:
        call = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {}}}
        result = {"role": "tool", "name": "look_up", "content": "A result.", "tool_call_id": "call00000"}
        seams = [({**said, "tool_calls": [call]}, result)]
    nothing = np.zeros(0, dtype=np.int32)
    for turn, observation in seams:
        try:
            if renders_anew:
                chat.rendered([_ASKED, turn, observation], nothing)
            else:
                chat.continuation(turn, [observation], nothing)
        except (ValueError, TemplateError) as error:
            raise ConfigError(f"policy.tokenizer.chat_template: {error}") from error
