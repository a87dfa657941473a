"""Messages and configs do not hold values of environment variables, nor credentials."""

# ruff: noqa: E501  # a case stands on one line

from typing import Any

import pytest
from pydantic import field_validator

from rl_core.config import Config, EnvVars, Problem, ProblemError, load, resolve
from rl_core.errors import ConfigError, ConfigProblems

SECRET = "sk-live-12345"
LONG = "sk-" + "x1y2" * 30


class Server(Config):
    port: int = 80
    url: str = ""
    api_key: str = ""
    max_new_token: int = 1
    choice: int | bool = 1
    names: list[str] = []
    env_vars: EnvVars = {}
    headers: dict[str, str] = {}

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith("http"):
            raise ProblemError(Problem("", got=value, allowed="http://..."))
        return value


class Root(Config):
    server: Server = Server()
    other: int = 0


def other_key(config: Root) -> list[Problem]:
    """A check that blames another key than the one with the value."""
    return [Problem("other", f"does not go with {config.server.api_key}")] if config.server.api_key else []


def message(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(load(tree), Root, checks=[other_key])
    return str(caught.value)


# config, and what its message must hold
VALUES = {
    "wrong type": ({"server": {"port": "${oc.env:S}"}}, "got \"${oc.env:S}\"; allowed: int"),
    "cut": ({"server": {"port": "${oc.env:LONG}"}}, "got \"${oc.env:LONG}\""),
    "part of a value": ({"server": {"port": "a-${oc.env:S}"}}, "got \"a-${oc.env:S}\""),
    "by way of a key": ({"server": {"port": "${server.api_key}", "api_key": "${oc.env:S}"}}, "got \"${server.api_key}\""),
    "remedy": ({"server": {"names": "${oc.env:S}"}}, "allowed: list of str"),
    "validator's own words": ({"server": {"url": "${oc.env:S}"}}, "got ${oc.env:S}; allowed: http://..."),
    "neither of a union": ({"server": {"choice": "${oc.env:S}"}}, "got \"${oc.env:S}\""),
    "below a section": ({"server": [{"api_key": "${oc.env:S}"}]}, "got [{\"api_key\": \"${oc.env:S}\"}]"),
    "another key": ({"server": {"api_key": "${oc.env:S}"}}, "does not go with ${oc.env:S}"),
    "name of a key": ({"other": "${server.${oc.env:S}}"}, "cannot be resolved"),
    "unreadable": ({"other": "${oc.decode:'[${oc.env:S}'}"}, "${oc.env:S}"),
    "short": ({"server": {"port": "x${oc.env:SHORT}"}}, "got \"x${oc.env:SHORT}\""),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_message_shows_how_a_value_of_the_environment_was_written(case, monkeypatch):
    monkeypatch.setenv("S", SECRET)
    monkeypatch.setenv("LONG", LONG)
    monkeypatch.setenv("SHORT", "7")
    tree, expected = VALUES[case]
    found = message(tree)
    assert expected in found
    assert SECRET not in found
    assert LONG[:12] not in found
    assert "x7" not in found


# config, and the key that is refused; None for none
CREDENTIALS = {
    "key": ({"server": {"env_vars": {"OPENAI_API_KEY": SECRET}}}, "server.env_vars.OPENAI_API_KEY"),
    "token": ({"server": {"env_vars": {"HF_TOKEN": SECRET}}}, "server.env_vars.HF_TOKEN"),
    "secret": ({"server": {"env_vars": {"AWS_SECRET": SECRET}}}, "server.env_vars.AWS_SECRET"),
    "password": ({"server": {"env_vars": {"DB_PASSWORD": SECRET}}}, "server.env_vars.DB_PASSWORD"),
    "small letters": ({"server": {"env_vars": {"db_password": SECRET}}}, "server.env_vars.db_password"),
    "another key": ({"server": {"api_key": SECRET}}, "server.api_key"),
    "header": ({"server": {"headers": {"Authorization": f"Bearer {SECRET}"}}}, "server.headers.Authorization"),
    "header of a service": ({"server": {"headers": {"X-Api-Key": SECRET}}}, "server.headers.X-Api-Key"),
    "address": ({"server": {"url": f"https://me:{SECRET}@host/v1"}}, "server.url"),
    "address of a proxy": ({"server": {"env_vars": {"HTTPS_PROXY": f"http://me:{SECRET}@host"}}}, "server.env_vars.HTTPS_PROXY"),
    "user of an address": ({"server": {"url": "https://me@host"}}, None),
    "another header": ({"server": {"headers": {"X-Team": "a"}}}, None),
    "from the environment": ({"server": {"env_vars": {"HF_TOKEN": "${oc.env:S}"}}}, None),
    "part of a value": ({"server": {"env_vars": {"AUTH_TOKEN": "Bearer ${oc.env:S}"}}}, None),
    "by way of a key": ({"server": {"url": "http://${oc.env:S}", "env_vars": {"MY_KEY": "${server.url}"}}}, None),
    "emptied": ({"server": {"env_vars": {"HF_TOKEN": ""}}}, None),
    "another variable": ({"server": {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}}, None),
    "number of tokens": ({"server": {"max_new_token": 3}}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CREDENTIALS)
def test_a_credential_is_taken_from_the_environment_and_not_written_in_the_config(case, monkeypatch):
    monkeypatch.setenv("S", SECRET)
    tree, key = CREDENTIALS[case]
    if key is None:
        resolve(load(tree), Root)
        return
    with pytest.raises(ConfigProblems) as refused:
        resolve(load(tree), Root)
    (problem,) = refused.value.problems
    name = key.rpartition(".")[2]
    assert problem.key == key
    assert f"{name}: ${{oc.env:{name.upper().replace('-', '_')}}} " in problem.remedy
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(problem)
