"""Conversations of several turns and tools that the chat template cannot carry, found before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from rl_algos.rollouts.config import GeneratingPolicy, PolicyGradientConfig, RolloutConfig
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.continuation import rewrites_history
from rl_algos.rollouts.worker.programs import TURNS
from rl_algos.tokenizer import render, require_chat_template
from rl_algos.tool_calls.formats import FORMATS, PLAIN
from rl_algos.turn_ends import TurnEnds
from rl_core.errors import ConfigError
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_ASKED: Message = {"role": "user", "content": "A question."}
_ANSWERED: Message = {"role": "assistant", "content": "An answer."}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {}}}
_RESULT: Message = {"role": "tool", "name": "look_up", "content": "A result.", "tool_call_id": "call00000"}

Tools = Mapping[str, Sequence[Mapping[str, Any]]]
"""JSON schemas of the tools of each environment that has some."""


def check_conversations(
    policy: GeneratingPolicy, settings: RolloutConfig, tokenizer: Tokenizer, tools: Tools
) -> TurnEnds:
    """Render short conversations as rollouts of several turns, and of tools, do.

    Args:
        policy: Config section of the model.
        settings: Section of the algorithm.
        tokenizer: Tokenizer of the policy.
        tools: Tools by environment; empty if none has any.

    Returns:
        The tokens that end a turn.

    Raises:
        ConfigError: With the key to change.
    """
    ends = check_turns(policy, settings, tokenizer, tools, turns_key=f"{settings.section}.max_rollout_turns")
    _check_penalties(settings, Chat(tokenizer, policy.tokenizer.tool_format), has_tools=bool(tools))
    takes_turns = settings.max_rollout_turns > 1 and settings.rollout_program in TURNS
    is_rendered = takes_turns and settings.agent is None
    if is_rendered and settings.rewritten_history is None and rewrites_history(tokenizer, ends):
        raise ConfigError(
            f"{settings.section}.rewritten_history: the chat template renders earlier turns differently from how "
            "the policy writes them (such as without their thoughts). Set this key to `keep` to continue from the "
            "tokens as they were sampled, or to `split` to train on what the template renders for each turn, or set "
            "policy.tokenizer.chat_template to a template that only appends"
        )
    return ends


def check_turns(
    policy: GeneratingPolicy, settings: RolloutConfig, tokenizer: Tokenizer, tools: Tools, *, turns_key: str
) -> TurnEnds:
    """Check the conversations of a model that does not train on its turns, so that its template may rewrite earlier
    ones; see `check_conversations`.

    Args:
        policy: Config section of the model.
        settings: Section of the algorithm.
        tokenizer: Tokenizer of the model.
        tools: Tools by environment; empty if none has any.
        turns_key: Key of the maximum number of turns, for messages.
    """
    require_chat_template(tokenizer)
    chat, max_turns = Chat(tokenizer, policy.tokenizer.tool_format), settings.max_rollout_turns
    plain = chat.ends.plain
    if plain and not any(stop in plain for stop in policy.generation.stop_strings):
        _log.warning(
            "the chat template ends a turn with %r, which is not a token of the tokenizer, so a turn ends only at %s. "
            "Set policy.generation.stop_strings: [%r], or set policy.tokenizer.name to a tokenizer that has the token",
            plain,
            tokenizer.eos_token,
            plain,
        )
    if tools:
        _check_tools(chat, tokenizer, max_turns, turns_key, tools)
    if max_turns > 1 and settings.rollout_program in TURNS:
        turn, answer = ({**_ANSWERED, "tool_calls": [_CALL]}, _RESULT) if tools else (_ANSWERED, _ASKED)
        nothing = np.zeros(0, dtype=np.int32)
        try:
            if settings.renders_anew:
                chat.rendered([_ASKED, turn, answer], nothing)
            else:
                chat.continuation(turn, [answer], nothing)
        except (ValueError, TemplateError) as error:
            raise ConfigError(f"policy.tokenizer.chat_template: {error}") from error
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


def _check_tools(chat: Chat, tokenizer: Tokenizer, max_turns: int, turns_key: str, tools: Tools) -> None:
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
