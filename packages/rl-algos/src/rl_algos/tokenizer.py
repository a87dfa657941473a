"""Tokenizers and chat templates, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rl_algos import hub
from rl_core.errors import ConfigError
from rl_core.model_config import TokenizerConfig
from rl_core.rollout import Message

# AutoTokenizer imports torch if it is installed (3 s); the fast class reads the same tokenizer.json
_FILES = "tokenizer.json"


def load_tokenizer(config: TokenizerConfig, model_name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or a hub name, with the configured chat template and its variables.

    Raises:
        ConfigError: if the files of a fast tokenizer, the end-of-sequence token or the template's file are missing.
    """
    name = config.name or model_name
    key = "policy.tokenizer.name" if config.name else "policy.model_name"
    if not _is_local(name) and (problem := hub.problem("model", name)):
        raise ConfigError(f"{key}: {name!r} is {problem}")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(_no_tokenizer(name, key, error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key}: the tokenizer of {name!r} has no end-of-sequence token, so no completion would end; "
            "set `eos_token` in its tokenizer_config.json or name another tokenizer in policy.tokenizer.name"
        )
    try:
        tokenizer.chat_template = config.template_text() or tokenizer.chat_template
    except ValueError as error:
        raise ConfigError(f"policy.tokenizer.chat_template: {error}") from error
    if config.chat_template_kwargs:
        require_chat_template(tokenizer)
        tokenizer.chat_template = config.with_variables(tokenizer.chat_template)
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    template: str | None = None,
) -> str:
    """The conversation as the text that the model reads.

    Args:
        tools: JSON schemas of the tools that the policy may call.
        template: Chat template to use instead of the tokenizer's.

    Raises:
        ConfigError: if the tokenizer has no chat template.
        jinja2.TemplateError: if the template refuses the messages.
    """
    require_chat_template(tokenizer)
    plain = [dict(message) for message in messages]
    shown = [dict(tool) for tool in tools] or None
    return str(
        tokenizer.apply_chat_template(
            plain, tools=shown, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> np.ndarray:
    """int32 `[tokens]`, the conversation up to the start of the policy's next turn; as `render`."""
    text = render(tokenizer, messages, add_generation_prompt=True, tools=tools)
    # the template adds the special tokens
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def require_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise a `ConfigError` that names the remedy if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"policy.tokenizer.chat_template: the tokenizer of {tokenizer.name_or_path!r} has no chat template; "
            "set policy.tokenizer.chat_template to a Jinja template or to the path of one, "
            "or policy.tokenizer.name to a chat model of the same vocabulary"
        )


def _no_tokenizer(name: str, key: str, error: Exception) -> str:
    folder = Path(name).expanduser()
    if folder.is_dir():
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
        return (
            f"{key}: the folder {name!r} has no {_FILES} that can be read (it holds {there}); "
            f"save a fast tokenizer there with `save_pretrained`, or name another tokenizer in policy.tokenizer.name"
        )
    if _is_local(name):
        return f"{key}: folder {name!r} does not exist; give a folder with {_FILES} or a hub name"
    reason = str(error).strip().splitlines()[0]
    return (
        f"{key}: {name!r} is not a local folder, and its {_FILES} could not be downloaded ({reason}). "
        "Check the name and, for a gated model, the HF_TOKEN"
    )


def _is_local(name: str) -> bool:
    """Whether a name is a folder, or can only be one."""
    return Path(name).expanduser().is_dir() or name.startswith(("/", ".", "~"))
