"""Problems with keys: the message that their fields make, and what is hidden in it."""

import pickle

import pytest

from rl_core.config import Problem
from rl_core.errors import NOT_GIVEN, ConfigProblems, show

KEY = "loss_fn.clip"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(KEY, "must be set"), "must be set"),
        (Problem(KEY, got=3), "got 3"),
        (Problem(KEY, got=None), "got null"),
        (Problem(KEY, got=False, allowed="true"), "got false; allowed: true"),
        (Problem(KEY, got="a b", allowed="float"), 'got "a b"; allowed: float'),
        (Problem(KEY, "is too large", got=0.5), "got 0.5: is too large"),
        (Problem(KEY, "must be set", allowed="int > 0"), "must be set; allowed: int > 0"),
        (Problem(KEY, allowed="int > 0"), "allowed: int > 0"),
        (Problem(KEY, "is odd", remedy="Add 1"), "is odd. Add 1"),
        (Problem(KEY, remedy="Add 1"), "Add 1"),
        (Problem(KEY, "is odd", got=3, allowed="2, 4", remedy="Add 1"), "got 3: is odd; allowed: 2, 4. Add 1"),
        (Problem(KEY), ""),
    ],
)  # fmt: skip
def test_a_message_has_the_value_the_reason_what_is_allowed_and_the_remedy_in_this_order(
    problem: Problem, message: str
) -> None:
    assert problem.message == message


def test_a_key_without_effect_has_its_condition_and_a_remedy_that_can_be_replaced() -> None:
    problem = Problem.unused(KEY, "with loss_fn.kl.weight=0")
    assert problem.is_unused
    assert problem.got is NOT_GIVEN
    assert problem.reason.endswith(" with loss_fn.kl.weight=0")
    assert problem.message == f"{problem.reason}. {problem.remedy}"
    replaced = Problem.unused(KEY, "with loss_fn.kl.weight=0", remedy="Raise the weight")
    assert (replaced.reason, replaced.remedy) == (problem.reason, "Raise the weight")
    assert not Problem(KEY, problem.reason).is_unused


def test_a_problem_at_another_key_is_otherwise_the_same() -> None:
    problem = Problem("clip", "is odd", got=3, allowed="2", remedy="Add 1", feature="odd clips")
    moved = problem.at(KEY)
    assert moved == Problem(KEY, "is odd", got=3, allowed="2", remedy="Add 1", feature="odd clips")
    assert moved.message == problem.message


def test_a_rewritten_problem_hides_a_value_in_every_field_of_its_message() -> None:
    problem = Problem(KEY, "secret is short", got="secret", allowed="not secret", remedy="Replace secret")
    hidden = problem.rewritten(lambda text: text.replace("secret", "${oc.env:S}"))
    assert hidden.message == 'got "${oc.env:S}": ${oc.env:S} is short; allowed: not ${oc.env:S}. Replace ${oc.env:S}'
    assert "secret" not in repr(hidden)
    assert hidden.key == KEY


@pytest.mark.parametrize("got", [3, "text", None, ["a"], NOT_GIVEN])
def test_a_problem_that_nothing_is_hidden_in_keeps_its_raw_value(got: object) -> None:
    problem = Problem(KEY, "is odd", got=got, is_unused=True, feature="odd clips")
    assert problem.rewritten(lambda text: text) == problem


def test_a_value_is_shown_as_yaml_on_one_line_and_cut_if_it_is_long() -> None:
    assert show({"a": [1, None, True]}) == '{"a": [1, null, true]}'
    assert show("größer") == '"größer"'
    assert len(show("x" * 100)) == 60
    assert show("x" * 100).endswith("...")


def test_problems_of_a_config_pickle_with_their_fields_and_hidden_values() -> None:
    raw = Problem(KEY, "is odd", got={"a": 3}, allowed="2", remedy="Add 1", feature="odd clips")
    unused = Problem.unused("grpo.seed", "with grpo.shuffle=false")
    hidden = Problem("a.key", got="secret").rewritten(lambda text: text.replace("secret", "${oc.env:S}"))
    error = ConfigProblems("3 problems in recipe.yaml", [raw, unused, hidden])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "3 problems in recipe.yaml"
    assert copy.problems == error.problems == (raw, unused, hidden)
    assert copy.problems[1].got is NOT_GIVEN
    assert [each.message for each in copy.problems] == [each.message for each in error.problems]
