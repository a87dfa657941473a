"""A root type like the real ones, in the folder of a user who writes recipes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sections import BackendConfig, DataConfig, EnvConfig, GenerationConfig, GRPOConfig, LossConfig, ModelConfig

from rl_core.config import Config, Resolved, assemble, load, resolve


@pytest.fixture(scope="session")
def root() -> type[Config]:
    generation = assemble("Generation", {"vllm_cfg": BackendConfig}, base=GenerationConfig)
    policy = assemble("Policy", {"dtensor_cfg": BackendConfig, "generation": generation}, base=ModelConfig)
    return assemble(
        "Root",
        {
            "algorithm": (str, ...),
            "grpo": GRPOConfig,
            "loss_fn": LossConfig,
            "policy": policy,
            "data": (DataConfig | None, None),
            "env": (dict[str, EnvConfig], {}),
        },
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one, so that files are named by their bare names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECIPE = """\
algorithm: grpo
policy:
  model_name: Qwen/Qwen3-0.6B
"""


@pytest.fixture
def run(folder: Path, root: type[Config]) -> Callable[..., Resolved[Any]]:
    """Resolve YAML text (`RECIPE` where none is given), written to `recipe.yaml`, and overrides."""

    def resolved(text: str = RECIPE, overrides: Sequence[str] = ()) -> Resolved[Any]:
        (folder / "recipe.yaml").write_text(text)
        return resolve(load("recipe.yaml", overrides), root)

    return resolved
