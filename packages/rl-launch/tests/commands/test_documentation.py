"""Places of keys in the documentation."""

from dataclasses import replace
from email.message import Message

import pytest

from rl_launch.commands import documentation
from rl_launch.commands.documentation import address_of
from rl_launch.commands.explain import explain_anywhere


def explanation(key):
    return explain_anywhere(key)[0].explanation


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("grpo.seed", "grpo.html#grpo.seed"),
        ("policy", "policy.html#policy"),
        ("policy.generation", "policy.html#policy.generation"),
        ("policy.optimizer.kwargs.betas[0]", "policy.html#policy.optimizer.kwargs.betas"),
        ("run_dir", "index.html#run_dir"),
    ],
)
def test_a_key_has_a_place(key, place):
    assert address_of(explanation(key)) == f"reference/config/{place}"


def test_a_key_that_the_documentation_lacks_has_none():
    assert address_of(replace(explanation("env.math.type"), key="env.mine.type")) == ""


def test_the_address_in_the_metadata_comes_first(monkeypatch):
    message = Message()
    message["Project-URL"] = "Documentation, https://example.org/rl/"
    monkeypatch.setattr(documentation, "metadata", lambda name: message)
    assert address_of(explanation("grpo.seed")) == "https://example.org/rl/reference/config/grpo.html#grpo.seed"
