"""Settings, tools and declaration of the environment `text_tools`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.math.plugin import AnswerFormat
from rl_envs.sandbox.config import SandboxConfig

ToolName = Literal["calculator", "python", "search"]


class TextToolsConfig(EnvironmentConfig):
    """Let a policy call tools, by tags such as `<calculator>12*7</calculator>` or as its model does, before it answers.

    A turn without a call is the final answer, which is compared with the row's `answer` as the environment `math` does.
    """

    tools: list[ToolName] = ["calculator"]
    """Tools that may be called: `calculator`; `python`, a session in a sandbox whose variables last for the whole
    conversation; `search` in `corpus`."""
    call_format: Literal["tags", "model"] = "tags"
    """Format of calls: `tags` in the text, one call per turn, which the prompts must explain; or `model`, the model's
    own format, whose chat template then shows the tools."""
    max_calls: int = Field(default=4, ge=1)
    """Maximum number of calls in a conversation; grpo.max_rollout_turns must allow one more turn."""
    answer_format: AnswerFormat = "auto"
    """Place of the final answer, as in the environment `math`."""
    max_output: int = Field(default=2000, ge=1)
    """Maximum number of characters in a tool's output; the middle of longer output is left out."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandbox of Python, and its limits; `wall_s` applies to one call."""
    corpus: PathText | None = None
    """Documents of `search`: a JSON Lines file, or a function that returns them (`package.module:function` or
    `file.py:function`), as objects with `text` and an optional `title` that are indexed in memory for BM25; or the
    `http` address of a retrieval server, which gets `queries` and `topk` and returns a `result` of documents, as
    Search-R1's does."""
    num_results: int = Field(default=3, ge=1)
    """Maximum number of documents that a search returns."""
    result_tag: str = Field(default="result", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Tag around the output of a tool, if calls are tags: `<result>` and `</result>`."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0)
    """Timeout in seconds of a call of the environment."""

    @model_validator(mode="after")
    def _has_a_corpus(self) -> Self:
        if not self.tools:
            raise ValueError("name at least one tool in `tools`")
        if "search" in self.tools and self.corpus is None:
            raise ValueError("the tool `search` needs `corpus`: a JSON Lines file, a function, or a server")
        if "python" in self.tools and (self.sandbox.url or self.sandbox.service):
            raise ValueError(
                "sessions of `python` run on this machine; leave `sandbox.url` and `sandbox.service` unset"
            )
        return self


PARAMETERS: Mapping[ToolName, str] = {"calculator": "expression", "python": "code", "search": "query"}
"""The parameter of each tool, a string."""
_DESCRIPTIONS: Mapping[ToolName, tuple[str, str]] = {
    "calculator": ("Compute an arithmetic expression.", "such as 12*7 or sqrt(2)/3"),
    "python": (
        "Run Python code and read what it prints. Variables keep their values for later calls.",
        "one or several lines",
    ),
    "search": ("Search documents and read those that fit best.", "words to look for"),
}
"""Descriptions of each tool and of its parameter, for the policy."""


def tools_of(config: TextToolsConfig) -> list[Mapping[str, Any]]:
    """Return JSON schemas of the tools that the policy may call in the format of its model, as chat templates take
    them; none if calls are tags."""
    schemas: list[Mapping[str, Any]] = []
    for name in config.tools if config.call_format == "model" else ():
        parameter, (description, text) = PARAMETERS[name], _DESCRIPTIONS[name]
        properties = {parameter: {"type": "string", "description": text}}
        parameters = {"type": "object", "properties": properties, "required": [parameter]}
        function = {"name": name, "description": description, "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


PLUGIN = EnvironmentPlugin(
    "text_tools",
    TextToolsConfig,
    "rl_envs.text_tools.environment:TextToolsEnvironment",
    Requirement("rl-envs"),
    tools="rl_envs.text_tools.plugin:tools_of",
    machine_check="rl_envs.text_tools.environment:check_machine",
)
