"""Prompt templates and system messages that are put around a dataset's inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import Example, column
from rl_algos.data.rows.messages import joined_parts
from rl_core.errors import ConfigError, DataError

_IMAGE = "\ue000image\ue001"
"""Stands for an image while a template is filled."""

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """A text with placeholders: `{input}` is the input, `{name}` the row's column of that name.

    `{{` and `}}` are braces, and braces around anything but a name stay as they are.

    Raises:
        ConfigError: If there is no placeholder, so that all prompts would be equal.
    """

    text: str
    source: str

    def __post_init__(self) -> None:
        if not any(match[1] for match in _PLACEHOLDER.finditer(self.text)):
            remedy = "write {input} where the input goes"
            raise ConfigError(f"data: prompt_file {self.source!r} has no placeholder; {remedy}")

    def fill(self, text: str, row: Mapping[str, Any]) -> str:
        """Return the text for one input; raise a `DataError` if a placeholder is not a column of the row."""

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return match[0][0]
            return text if name == "input" else str(column(row, name))

        try:
            return _PLACEHOLDER.sub(value, self.text)
        except DataError as error:
            remedy = "write {{ and }} for braces in the text"
            raise DataError(f"prompt_file {self.source!r}: {error}; {remedy}") from None


@dataclass(frozen=True)
class Surround:
    """Texts that a dataset puts around each conversation.

    Args:
        prompt: Template for the last user message; None to leave it as it is.
        system: First message, None for none.
    """

    prompt: PromptTemplate | None
    system: str | None

    @classmethod
    def of(cls, settings: DatasetConfig) -> Surround:
        """Return the strings that the dataset's settings refer to; raise a `ConfigError` if a file cannot be read."""
        file, system_file = settings.prompt_file, settings.system_prompt_file
        prompt = None if file is None else PromptTemplate(_text("prompt_file", file), file)
        return cls(prompt, None if system_file is None else _text("system_prompt_file", system_file).strip())

    @property
    def texts(self) -> list[str]:
        """The strings themselves, as they are in their files."""
        return [text for text in (self.system, self.prompt.text if self.prompt else None) if text is not None]

    def apply(self, example: Example, row: Mapping[str, Any]) -> Example:
        """Return the example with these strings.

        Raises:
            DataError: If it has no user message, or already has a system message.
        """
        messages = list(example.messages)
        if self.prompt is not None:
            users = [index for index, message in enumerate(messages) if message["role"] == "user"]
            if not users:
                raise DataError("prompt_file needs a user message, but the conversation has none")
            last = messages[users[-1]]
            messages[users[-1]] = {**last, "content": _filled(self.prompt, last["content"], row)}
        if self.system is not None:
            if messages and messages[0]["role"] == "system":
                raise DataError("the row already has a system message; remove it, or remove system_prompt_file")
            messages.insert(0, {"role": "system", "content": self.system})
        return replace(example, messages=tuple(messages), is_text=example.is_text and self.system is None)


def _filled(prompt: PromptTemplate, content: Any, row: Mapping[str, Any]) -> Any:
    """Return the content with the template around it; images of a content in parts keep their places in its text."""
    if isinstance(content, str):
        return prompt.fill(content, row)
    images = [part for part in content if part["type"] != "text"]
    text = prompt.fill("".join(part.get("text", _IMAGE) for part in content), row)
    pieces = text.split(_IMAGE)
    if len(pieces) != len(images) + 1:
        raise DataError("prompt_file must contain {input} once, because the input has images")
    return joined_parts(each for pair in zip_longest(pieces, images, fillvalue="") for each in pair)


def _text(key: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"data: {key} {path!r} cannot be read: {reason}; pass a text file in UTF-8") from error
