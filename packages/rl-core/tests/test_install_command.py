"""Remedies that fit the environment."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core import install_command as module
from rl_core.exports import lazy_exports
from rl_core.install_command import extras_with, install_command

BIN = Path(sys.executable).parent


class Place:
    """An environment as `install_command` sees it: not a checkout, writable, without pip and uv, and not active."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.direct_url: dict[str, object] = {}
        self.installed = {"rl-core", "rl-launch"}
        monkeypatch.setattr(module.importlib.metadata, "distribution", self._distribution)
        monkeypatch.setattr(module.importlib.metadata, "version", self._version)
        monkeypatch.delenv("VIRTUAL_ENV", raising=False)
        monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
        monkeypatch.setattr(module.os, "access", lambda *_: True)
        self.has_pip(None)
        self.has_uv("/usr/bin/uv")

    def _distribution(self, name: str) -> object:
        return SimpleNamespace(read_text=lambda _: json.dumps(self.direct_url))

    def _version(self, name: str) -> str:
        if name not in self.installed:
            raise module.importlib.metadata.PackageNotFoundError(name)
        return "0.2.0"

    def has_pip(self, on_path: str | None, *, is_here: bool = False) -> None:
        self.monkeypatch.setattr(module, "find_spec", lambda _: object() if is_here else None)
        self.pip = on_path

    def has_uv(self, on_path: str | None) -> None:
        self.monkeypatch.setattr(module.shutil, "which", lambda name: on_path if name == "uv" else self.pip)

    def is_checkout(self) -> Path:
        (self.folder / "packages" / "rl-envs").mkdir(parents=True)
        (self.folder / "packages" / "rl-core").mkdir()
        (self.folder / "uv.lock").touch()
        self.direct_url = {"url": (self.folder / "packages" / "rl-core").as_uri(), "dir_info": {"editable": True}}
        return self.folder


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    return Place(monkeypatch, tmp_path)


def test_pip_is_named_alone_only_if_it_is_that_of_this_environment(place: Place) -> None:
    place.has_pip(str(BIN / "pip"), is_here=True)
    assert install_command("rl-launch[wandb]") == "pip install 'rl-launch[wandb]'"
    assert install_command("uv") == "pip install uv"
    for elsewhere in ("/usr/bin/pip", None):
        place.has_pip(elsewhere, is_here=True)
        assert install_command("uv") == f"{sys.executable} -m pip install uv"


def test_without_pip_uv_is_told_the_environment_unless_the_shell_is_in_it(place: Place) -> None:
    assert install_command("wandb") == f"uv pip install wandb --python {sys.executable}"
    place.monkeypatch.setenv("VIRTUAL_ENV", str(place.folder))
    assert install_command("wandb") == f"uv pip install wandb --python {sys.executable}"
    place.monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert install_command("wandb") == "uv pip install wandb"
    place.monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert install_command("wandb") == f"uv pip install wandb --python {sys.executable}"


def test_a_uv_that_is_only_in_the_environment_is_named_by_its_path(place: Place) -> None:
    place.has_uv(None)
    own = BIN / "uv"
    named = str(own) if own.exists() else "uv"
    assert install_command("wandb").startswith(f"{named} pip install ")


def test_a_package_that_is_on_no_index_comes_from_the_checkout(place: Place) -> None:
    root = place.is_checkout()
    assert f"'{root}/packages/rl-envs[reasoning-gym]'" in install_command("rl-envs[reasoning-gym]")
    assert " 'rl-core[vision]' " in install_command("rl-core[vision]")
    place.installed.add("rl-envs")
    assert " 'rl-envs[reasoning-gym]' " in install_command("rl-envs[reasoning-gym]")


def test_in_the_environment_of_a_checkout_the_remedy_says_what_uv_sync_does(place: Place) -> None:
    root = place.is_checkout()
    assert "uv sync" not in install_command("rl-launch[wandb]")
    (root / ".venv").symlink_to(sys.prefix)
    assert "uv sync --inexact does not" in install_command("rl-launch[wandb]")


def test_an_environment_that_cannot_be_changed_is_named_with_the_image(place: Place) -> None:
    place.monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert f"the owner of {sys.prefix}, or in the image" in install_command("rl-launch[wandb]")


def test_the_extra_that_brings_a_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {
        "rl-x": ['torch>=2; extra == "worker"', 'rl-core[vision]>=0.2; extra == "images"', "numpy"],
        "rl-core": ['pillow>=11; extra == "vision"', 'torch; python_version > "3" and extra == "torch"'],
    }
    monkeypatch.setattr(module.importlib.metadata, "requires", required.__getitem__)
    found = {name: extras_with("rl-x", name) for name in ("torch", "pillow", "numpy", "os")}
    assert found == {"torch": ["worker"], "pillow": ["images"], "numpy": [], "os": []}


def test_a_public_name_whose_engine_is_not_installed_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "rl_thing"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__init__.pyi").write_text("from rl_thing.worker import Worker as Worker\n")
    (package / "worker.py").write_text("import engine.kernels\nclass Worker: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("rl_thing")
    get, _ = lazy_exports("rl_thing")
    monkeypatch.setattr(module.importlib.metadata, "requires", lambda _: ['engine-core>=2; extra == "worker"'])
    with pytest.raises(ModuleNotFoundError, match=r"rl_thing.Worker needs engine, .*'rl-thing\[worker\]'"):
        get("Worker")
    monkeypatch.setattr(module.importlib.metadata, "requires", lambda _: [])
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'engine'$"):
        get("Worker")
