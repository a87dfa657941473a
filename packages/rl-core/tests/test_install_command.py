"""Remedies that fit the environment."""

import sys
from pathlib import Path

import pytest

from rl_core import install_command as module
from rl_core.install_command import install_command


@pytest.fixture
def has_pip(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object() if request.param else None)


@pytest.mark.parametrize("has_pip", [True], indirect=True)
@pytest.mark.usefixtures("has_pip")
def test_an_environment_with_pip_installs_by_pip() -> None:
    assert install_command("rl-envs[reasoning-gym]") == "pip install 'rl-envs[reasoning-gym]'"
    assert install_command("uv") == "pip install uv"


@pytest.mark.parametrize("has_pip", [False], indirect=True)
@pytest.mark.usefixtures("has_pip")
def test_an_environment_without_pip_installs_by_uv_into_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert install_command("rl-vllm[cpu]") == "uv pip install 'rl-vllm[cpu]'"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert install_command("wandb") == f"uv pip install wandb --python {sys.executable}"
