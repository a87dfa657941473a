"""The tools as the chat template of a model shows them: each takes one text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_envs.text_tools.config import TextToolsConfig


@dataclass(frozen=True)
class Described:
    """A tool for the policy.

    Args:
        doc: What it does.
        parameter: Name of its text.
        parameter_doc: What that text is.
    """

    doc: str
    parameter: str
    parameter_doc: str

    def schema(self, name: str) -> dict[str, Any]:
        """As JSON schema, in the form that chat templates take."""
        parameter = {"type": "string", "description": self.parameter_doc}
        parameters = {"type": "object", "properties": {self.parameter: parameter}, "required": [self.parameter]}
        return {"type": "function", "function": {"name": name, "description": self.doc, "parameters": parameters}}


DESCRIBED: Mapping[str, Described] = {
    "calculator": Described("Compute an arithmetic expression.", "expression", "such as 12*7 or sqrt(2)/3"),
    "python": Described(
        "Run Python code and read what it prints. Variables keep their values for later calls.",
        "code",
        "one or several lines",
    ),
    "search": Described("Search documents and read those that fit best.", "query", "words to look for"),
}


def tools_of(config: TextToolsConfig) -> list[Mapping[str, Any]]:
    """Schemas of the tools that the policy may call in the format of its model; none if calls are tags."""
    if config.call_format == "tags":
        return []
    return [DESCRIBED[name].schema(name) for name in config.tools]
