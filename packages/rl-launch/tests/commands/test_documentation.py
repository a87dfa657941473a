"""Places of keys in the documentation."""

from dataclasses import replace
from email.message import Message
from pathlib import Path

import pytest

from rl_launch.commands import explain
from rl_launch.commands.explain import address_of, explain_anywhere, guide_about, page_of


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
    assert page_of(explanation(key)) == f"reference/config/{place}"


def test_a_documented_key_has_an_address_below_the_address_in_the_metadata(monkeypatch):
    message = Message()
    message["Project-URL"] = "Documentation, https://example.org/rl/"
    monkeypatch.setattr(explain, "metadata", lambda name: message)
    assert address_of(explanation("grpo.seed")) == "https://example.org/rl/reference/config/grpo.html#grpo.seed"
    assert address_of(replace(explanation("env.math.type"), key="env.mine.type")) == ""


def test_without_an_address_in_the_metadata_there_is_none(monkeypatch):
    monkeypatch.setattr(explain, "metadata", lambda name: Message())
    assert address_of(explanation("grpo.seed")) == ""


@pytest.mark.parametrize("words", ["freeze", "policy.freeze_layers", "frozen layers", "Freezing", "requires_grad"])
def test_freezing_has_a_guide(words):
    assert guide_about(words) == "docs/freezing.md"
    assert (Path(__file__).parents[4] / guide_about(words)).is_file()


def test_other_words_have_no_guide():
    assert guide_about("frequency") == guide_about("temperature") == ""
