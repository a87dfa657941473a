"""Tokenizers and chat templates, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError, TemplateRuntimeError, TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from rl_algos import hub
from rl_algos.images.image_tokens import ATTRIBUTE, check_images, image_tokens, read_image_tokens, texts_of, with_images
from rl_algos.special_tokens import SPLIT, special_tokens, splits_prompts
from rl_algos.tool_calls.formats import format_of
from rl_core.errors import ConfigError, DataError
from rl_core.facts.template_ends import POLICY_MARK
from rl_core.model_config import TokenizerConfig, VisionConfig
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer

# AutoTokenizer imports torch if it is installed (3 s); the fast class reads the same tokenizer.json.
_FILES = "tokenizer.json"

_RENDERING_S = 20.0
"""Maximum seconds of a chat template for a short conversation; known ones take milliseconds."""

_TEXT_ONLY = VisionConfig()

_ENDS = "ids_of_generation_ends"
"""Attribute of a loaded tokenizer; see `generation_ends`."""


def load_tokenizer(
    config: TokenizerConfig, model_name: str, vision: VisionConfig = _TEXT_ONLY
) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a local folder or a hub name, with the configured chat template and its variables, and with
    the strings that the model's processor writes for images if `vision` is enabled.

    Raises:
        ConfigError: If the files of a fast tokenizer, the end-of-sequence token or the template's file are missing, the
            template does not end, or the model cannot read images.
    """
    name = config.name or model_name
    key = "policy.tokenizer.name" if config.name else "policy.model_name"
    if not _is_local(name) and (problem := hub.problem("model", name)):
        raise ConfigError(f"{key}: {name!r} is {problem}")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    except Exception as error:
        raise ConfigError(_no_tokenizer(name, key, error)) from error
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise ConfigError(f"{key}: the chat template of {name!r} is not a string. Set policy.tokenizer.chat_template")
    if tokenizer.eos_token_id is None:
        reason = f"{key}: the tokenizer of {name!r} has no end-of-sequence token, so no completion would end"
        remedy = "set `eos_token` in its tokenizer_config.json, or set policy.tokenizer.name to another tokenizer"
        raise ConfigError(f"{reason}; {remedy}")
    setattr(tokenizer, _ENDS, _read_generation_ends(tokenizer, model_name))
    setattr(tokenizer, SPLIT, config.split_special_tokens)
    images = read_image_tokens(tokenizer, model_name, vision)
    setattr(tokenizer, ATTRIBUTE, images)
    own_template = tokenizer.chat_template if images is None else images.chat_template or tokenizer.chat_template
    try:
        tokenizer.chat_template = config.template_text() or own_template
    except ValueError as error:
        raise ConfigError(f"policy.tokenizer.chat_template: {error}") from error
    if config.chat_template_kwargs:
        require_chat_template(tokenizer)
        tokenizer.chat_template = config.with_variables(tokenizer.chat_template)
    tokenizer.chat_template = config.with_date(tokenizer.chat_template)
    _check_rendering_ends(tokenizer)
    if images is not None:
        _check_images_shown(tokenizer)
    return tokenizer


def plain_tokenizer(name: str) -> Any:
    """Load the tokenizer of a local folder or a hub name as it is; return None if it has no tokenizer files."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(name)
    except (OSError, ValueError):
        return None


def different_token(name: str, tokenizer: Any, *, whose: str) -> str:
    """Return the first token of a tokenizer that means something else to a model, in words; empty if there is none, or
    the model has no tokenizer files.

    Args:
        name: Folder or hub name of the model.
        tokenizer: The tokenizer.
        whose: Owner of the tokenizer, such as "the student's".
    """
    other = plain_tokenizer(name)
    if other is None:
        return ""
    own, theirs = ({number: token for token, number in each.get_vocab().items()} for each in (tokenizer, other))
    for number in sorted(own):
        if theirs.get(number) != own[number]:
            return f"its token {number} is {theirs.get(number)!r}, {whose} {own[number]!r}"
    return ""


def _check_rendering_ends(tokenizer: Tokenizer) -> None:
    """Render a short conversation, because a template is code from the hub. Its sandbox bounds a loop, but not loops in
    loops.

    Raises:
        ConfigError: If it takes longer than `_RENDERING_S`, or more memory than there is.
    """
    if tokenizer.chat_template is None:
        return
    if _has_powers(tokenizer.chat_template):
        raise ConfigError(
            f"policy.tokenizer.chat_template: the chat template of {tokenizer.name_or_path!r} computes powers (`**`), "
            "which may take forever and cannot be interrupted. Write the number instead, or set this key to another one"
        )
    failures: list[MemoryError] = []

    def rendered() -> None:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        except MemoryError as error:
            failures.append(error)
        except Exception:  # noqa: BLE001 - a refusal of the template is reported with its row
            return

    # A thread cannot be ended. A daemon ends with the process, which the error below ends.
    thread = Thread(target=rendered, daemon=True, name="first rendering of the chat template")
    thread.start()
    thread.join(_RENDERING_S)
    if thread.is_alive() or failures:
        why = "needs more memory than there is" if failures else f"does not end within {_RENDERING_S:g} s"
        problem = f"policy.tokenizer.chat_template: rendering a short conversation {why}"
        remedy = f"check the chat template of {tokenizer.name_or_path!r}, or set this key to another one"
        raise ConfigError(f"{problem}; {remedy}")


def _has_powers(template: str) -> bool:
    """Return whether a template has the operator of powers, which is also written before keyword arguments."""
    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError:
        return False
    return any(
        token == ("operator", "**") and before not in {("operator", "("), ("operator", ",")}
        for before, token in pairwise(tokens)
    )


def generation_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that end a completion by the model's `generation_config.json`. Llama's and Qwen's
    instruct models have several. There are none for a tokenizer that `load_tokenizer` did not load."""
    return tuple(getattr(tokenizer, _ENDS, ()))


def _read_generation_ends(tokenizer: Tokenizer, model_name: str) -> tuple[int, ...]:
    """Read `eos_token_id` of the model's `generation_config.json`, or of its `config.json` if it has none.

    Raises:
        ConfigError: If the file cannot be read, or the ids are not integers.
    """
    for name in ("generation_config.json", "config.json"):
        path = _file_of(model_name, name)
        if path is None:
            continue
        try:
            given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"policy.model_name: {path} is not a JSON object ({error}); restore the file") from error
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if not all(type(each) is int for each in ids):
            raise ConfigError(
                f"policy.model_name: `eos_token_id` of {path} must be an integer or a list of integers, got {given!r}"
            )
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        return tuple(each for each in ids if each in special)
    return ()


def _file_of(model_name: str, name: str) -> Path | None:
    """Return the path of a model's file; None if the model does not have it, or cannot be reached."""
    folder = Path(model_name).expanduser()
    if _is_local(model_name):
        return folder / name if (folder / name).is_file() else None
    options = ("gated_repo", "missing_entries", "connection_errors")
    found = cached_file(model_name, name, **{f"_raise_exceptions_for_{each}": False for each in options})
    return None if found is None else Path(found)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    template: str | None = None,
) -> str:
    """Return the conversation as the text that the model reads.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages of the conversation.
        add_generation_prompt: True to end with the tokens that start a turn of the assistant.
        tools: JSON schemas of the tools that the policy may call.
        template: Chat template to use instead of the tokenizer's.

    Raises:
        ConfigError: If the tokenizer has no chat template.
        jinja2.TemplateError: if the template refuses the messages.
    """
    require_chat_template(tokenizer)
    as_text = format_of(tokenizer.chat_template).arguments_as_text
    shown: list[Any] | None = [dict(tool) for tool in tools] or None
    in_parts = image_tokens(tokenizer) is not None and _wants_parts(tokenizer, tokenizer.chat_template)
    try:
        plain = [_as_templates_take_it(message, arguments_as_text=as_text, in_parts=in_parts) for message in messages]
        return str(
            tokenizer.apply_chat_template(
                plain, tools=shown, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # The template's own code failed on a message of a form that it does not know.
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


def _as_templates_take_it(message: Message, *, arguments_as_text: bool, in_parts: bool) -> dict[str, Any]:
    """Return a message with a string or a list of parts as its content, and with arguments of calls as a string if the
    template joins them. Images have no more than their type."""
    plain = dict(message)
    content = plain.get("content") or ""
    if isinstance(content, list | tuple):
        content = [{"type": "image"} if part["type"] == "image" else dict(part) for part in content]
    elif in_parts:
        content = [{"type": "text", "text": content}] if content else []
    plain["content"] = content
    if arguments_as_text and plain.get("tool_calls"):
        calls = []
        for call in plain["tool_calls"]:
            arguments = call["function"].get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        plain["tool_calls"] = calls
    return plain


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> np.ndarray:
    """Return the tokens of the conversation up to the start of the policy's next turn. The setting
    `policy.tokenizer.split_special_tokens` decides whether special tokens in its content are text. Each image has all
    its tokens.

    Returns:
        int32 `[tokens]`.

    Raises:
        ConfigError, jinja2.TemplateError: See `render`.
        DataError: If the template leaves out a message of the system or the user, or the model cannot read its images.
    """
    special = special_tokens(tokenizer)
    shown = special.hidden(messages) if splits_prompts(tokenizer) else messages
    check_images(tokenizer, shown)
    text = render(tokenizer, shown, add_generation_prompt=True, tools=tools)
    check_shown(shown, text)
    text, _ = with_images(tokenizer, shown, text)
    # The template adds the special tokens.
    return np.asarray(special.encode(text), dtype=np.int32)


def check_shown(messages: Sequence[Message], text: str) -> None:
    """Raise a `DataError` if a message of the system or the user is missing from the rendered conversation."""
    shown = squeezed(text)
    for index, message in enumerate(messages):
        if message["role"] not in ("system", "developer", "user"):
            continue
        missing = next((content for content in texts_of(message) if squeezed(content) not in shown), None)
        if missing is not None:
            raise DataError(
                f"the chat template does not show message {index} (from 0), whose role is {message['role']!r}: "
                f"{missing[:80]!r}; set policy.tokenizer.chat_template to a template that does, or remove the message"
            )


@lru_cache(maxsize=8)
def _wants_parts(tokenizer: Any, template: str) -> bool:
    """Return whether a chat template only shows a content that is a list of parts, as some vision-language models
    do."""

    def shows(content: Any) -> bool:
        try:
            return POLICY_MARK in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except (TypeError, ValueError, LookupError, AttributeError, TemplateError):
            return False

    return not shows(POLICY_MARK) and shows([{"type": "text", "text": POLICY_MARK}])


def _check_images_shown(tokenizer: Tokenizer) -> None:
    """Raise a `ConfigError` if the chat template does not write one placeholder for an image."""
    tokens = image_tokens(tokenizer)
    if tokens is None or tokenizer.chat_template is None:
        return
    asked: Message = {"role": "user", "content": ({"type": "image"}, {"type": "text", "text": POLICY_MARK})}
    try:
        text = render(tokenizer, [asked], add_generation_prompt=True)
    except TemplateError as error:
        text = f"{type(error).__name__}: {error}"
    if text.count(tokens.marks.placeholder) != 1 or POLICY_MARK not in text:
        raise ConfigError(
            "policy.tokenizer.chat_template: the template does not show a message with an image and a text: it must "
            f"write {tokens.marks.placeholder} for the image. Use the template of the model's processor"
        )


def squeezed(text: str) -> str:
    """Return a string without white space, which chat templates trim."""
    return "".join(text.split())


def require_chat_template(tokenizer: Tokenizer) -> None:
    """Raise a `ConfigError` with the remedy if the tokenizer has no chat template."""
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
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return (
            f"{key}: the folder {name!r} has no {_FILES} that can be read (it holds {there}): {reason}; "
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
    """Return whether a name is a folder, or can only be one."""
    return Path(name).expanduser().is_dir() or name.startswith(("/", ".", "~"))
