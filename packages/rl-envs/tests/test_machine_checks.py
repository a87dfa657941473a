"""What `rl doctor` asks environments about a machine."""

from types import SimpleNamespace

import pytest

from rl_core.environments.instance import instance_of, machine_check_of
from rl_envs.code.plugin import CodeConfig
from rl_envs.math.plugin import MathConfig
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.text_tools.plugin import TextToolsConfig


class Environments(SimpleNamespace):
    model_fields = ("code", "math", "text_tools")


@pytest.fixture(autouse=True)
def refused(monkeypatch):
    """A machine that contains nothing."""
    monkeypatch.setattr("rl_envs.sandbox.remote.WAITS_S", ())

    def refuse(sandbox):
        raise SandboxUnavailable(f"no {sandbox.isolation} here")

    monkeypatch.setattr(Sandbox, "_start", refuse)


def check_of(name, config):
    return machine_check_of(instance_of(Environments(**{name: config}), name))


def test_a_sandbox_that_the_machine_does_not_offer_is_reported():
    assert check_of("code", CodeConfig())() == "no namespaces here"
    assert check_of("code", CodeConfig(sandbox=SandboxConfig(isolation="landlock")))() == "no landlock here"
    assert check_of("text_tools", TextToolsConfig(tools=["python"]))() == "no namespaces here"


def test_what_opens_no_sandbox_needs_none():
    assert check_of("text_tools", TextToolsConfig(tools=["calculator"]))() == ""
    assert check_of("math", MathConfig()) is None


def test_a_server_is_tried():
    problem = check_of("code", CodeConfig(sandbox=SandboxConfig(url="http://127.0.0.1:9")))()
    assert "the sandbox server http://127.0.0.1:9/run_code did not answer" in problem


def test_a_sandbox_that_works_is_closed_again(monkeypatch):
    monkeypatch.undo()
    assert check_of("code", CodeConfig(sandbox=SandboxConfig(isolation="limits")))() == ""
