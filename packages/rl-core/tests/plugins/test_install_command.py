"""Remedies that fit the environment."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core.plugins import install_command as module
from rl_core.plugins.install_command import install_advice, install_command


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


@pytest.mark.parametrize("has_pip", [False, True], indirect=True)
@pytest.mark.usefixtures("has_pip")
def test_in_a_checkout_the_advice_says_what_uv_sync_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    folder = tmp_path / "packages" / "rl-core"
    url = json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(module.importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: url))
    alone = install_command("rl-launch[wandb]")
    assert install_advice("rl-launch[wandb]") == alone
    (tmp_path / "uv.lock").touch()
    kept = " (this is a checkout: uv sync removes it again, uv sync --inexact does not)"
    assert install_advice("rl-launch[wandb]") == (alone if alone.startswith("pip") else alone + kept)
