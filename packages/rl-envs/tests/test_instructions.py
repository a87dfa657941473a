"""The environment `instructions`."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.environment import Conversation, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.instructions.checks import CHECKS, is_followed
from rl_envs.instructions.config import InstructionsConfig
from rl_envs.instructions.environment import InstructionsEnvironment

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["Sea", "sun"]}, "the sun over the sea", "the sun"),
    "keywords:frequency": ({"keyword": "ab", "frequency": 2, "relation": "at least"}, "ab ab", "ab"),
    "keywords:forbidden_words": ({"forbidden_words": ["bad"]}, "a badge", "this is Bad"),
    "keywords:letter_frequency": ({"letter": "q", "let_frequency": 1, "let_relation": "less than"}, "abc", "Quick"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "it's only three", "two words"),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "less than"}, "One. ", "One. Two!"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\n\n***\nb"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First, a.\n\nThen b.",
        "Then a.\n\nFirst b.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] of [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye\nP.S. more", "Bye, P.S. more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n- b\n- c"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "** ** and *a*"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a\nSection 2 b",
        "Section 1 a",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<A day>>\ntext", "<< >>\ntext"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "Say it. It.", "It."),
    "startend:end_checker": ({"end_phrase": "The end."}, 'so. The END."', "The end. Not yet"),
    "startend:quotation": ({}, '"quoted"', '"quoted" not'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 1, "capital_relation": "at least"},
        "LOUD words",
        "quiet Words",
    ),
    "change_case:english_capital": ({}, "ALL CAPITAL 1.", "ALL but THIS"),
    "change_case:english_lowercase": ({}, "all small 1.", "all But this"),
    "punctuation:no_comma": ({}, "one two", "one, two"),
}


def test_every_check_has_a_case() -> None:
    assert set(CASES) == set(CHECKS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_check_tells_a_response_that_follows_from_one_that_does_not(name: str) -> None:
    arguments, follows, misses = CASES[name]
    columns = {"num_words_of_others": None, **arguments}  # as columnar files fill them in
    assert is_followed(name, follows, columns)
    assert not is_followed(name, misses, columns)
    assert not is_followed(name, "  ", columns)


def test_rewards_are_for_all_or_for_a_share() -> None:
    info = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, None]}
    turn = Conversation("0", (), info, "no comma")
    for reward, expected in (("all", 0.0), ("share", 0.5)):
        config = InstructionsConfig.model_validate({"reward": reward})
        [result] = InstructionsEnvironment(config).step([turn], [None])
        assert result.rewards()["reward"] == expected
        assert result.info == {"accuracy": 0.0, "followed": 0.5, "missed": "startend:quotation"}


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"answer": 1}, "instruction_id_list"),
        ({"instruction_id_list": ["none:such"]}, "there is no check"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"x": 1}]}, "unexpected keyword"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "1 instructions and 0"),
        (
            {
                "instruction_id_list": ["keywords:frequency"],
                "kwargs": [{"keyword": "a", "frequency": 1, "relation": "over"}],
            },
            "at least",
        ),
    ],
)
def test_a_row_without_usable_instructions_is_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(UnusableAnswer, match=says):
        InstructionsEnvironment(InstructionsConfig()).step([Conversation("0", (), info, "x")], [None])


class TestConformance(EnvironmentSuite):
    def environment(self) -> InstructionsEnvironment:
        return InstructionsEnvironment(InstructionsConfig())

    def conversations(self) -> list[Conversation]:
        info = {"instruction_id_list": ["punctuation:no_comma"]}
        return [Conversation(text, (), info, text) for text in ("a", "a, b", "b")]
