"""Settings of the environment `text_tools`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_envs.math.config import AnswerFormat
from rl_envs.sandbox.config import SandboxConfig

ToolName = Literal["calculator", "python", "search"]


class TextToolsConfig(EnvironmentConfig):
    """Let a policy call tools, by tags such as `<calculator>12*7</calculator>` or as its model does, before it answers.

    A turn without a call is the final answer, which is compared with the row's `answer` as the environment `math` does.
    """

    tools: list[ToolName] = ["calculator"]
    """Tools that may be called: `calculator`; `python`, a session in a sandbox whose variables live as long as the
    conversation; `search` in `corpus`."""
    call_format: Literal["tags", "model"] = "tags"
    """How calls are written: `tags` in the text, one call a turn, which the prompts must explain; or `model`, in the
    format of the model, whose chat template then shows the tools."""
    max_calls: int = Field(default=4, ge=1)
    """Most calls of a conversation; grpo.max_rollout_turns must allow one turn more."""
    answer_format: AnswerFormat = "auto"
    """The place of the final answer, as in the environment `math`."""
    max_output: int = Field(default=2000, ge=1)
    """Most characters of a tool's output; the middle of a longer one is left out."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where and within which limits Python runs; `wall_s` is for one call."""
    corpus: PathText | None = None
    """A JSON Lines file with the documents of `search`: objects with `text`, and perhaps `title`."""
    num_results: int = Field(default=3, ge=1)
    """Most documents that a search finds."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0)
    """Most seconds of a call of the environment."""

    @model_validator(mode="after")
    def _has_a_corpus(self) -> Self:
        if not self.tools:
            raise ValueError("name at least one tool in `tools`")
        if "search" in self.tools and self.corpus is None:
            raise ValueError("the tool `search` needs `corpus`, a JSON Lines file with documents")
        if "python" in self.tools and self.sandbox.url is not None:
            raise ValueError("sessions of the tool `python` run on this machine; leave `sandbox.url` unset")
        return self
