"""Texts that are put around a dataset's inputs: prompt templates and system messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, column
from rl_algos.data.messages import joined_parts
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
            raise ConfigError(
                f"data: prompt_file {self.source!r} has no placeholder; write {{input}} where the input goes"
            )

    def fill(self, text: str, row: Mapping[str, Any]) -> str:
        """The text for one input; raises a `DataError` if a placeholder is not a column of the row."""

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return match[0][0]
            return text if name == "input" else str(column(row, name))

        try:
            return _PLACEHOLDER.sub(value, self.text)
        except DataError as error:
            raise DataError(
                f"prompt_file {self.source!r}: {error}; write {{{{ and }}}} for braces in the text"
            ) from None


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
        """Return the strings that the dataset's settings refer to; raises a `ConfigError` if a file cannot be read."""
        return cls(
            None
            if settings.prompt_file is None
            else PromptTemplate(_text("prompt_file", settings.prompt_file), settings.prompt_file),
            None
            if settings.system_prompt_file is None
            else _text("system_prompt_file", settings.system_prompt_file).strip(),
        )

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
            messages[users[-1]] = {**last, "content": self._filled(last["content"], row)}
        if self.system is not None:
            if messages and messages[0]["role"] == "system":
                raise DataError("the row already has a system message; remove it, or remove system_prompt_file")
            messages.insert(0, {"role": "system", "content": self.system})
        return replace(example, messages=tuple(messages), is_text=example.is_text and self.system is None)

    def _filled(self, content: Any, row: Mapping[str, Any]) -> Any:
        """The content with the template around it; images of a content in parts stay where they are in its text."""
        assert self.prompt is not None
        if isinstance(content, str):
            return self.prompt.fill(content, row)
        images = [part for part in content if part["type"] == "image"]
        text = self.prompt.fill("".join(part.get("text", _IMAGE) for part in content), row)
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
