"""The environment `instructions`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_core.rollouts.environment import Conversation, UnusableAnswer
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.instructions.checks import CHECKS
from rl_envs.instructions.environment import InstructionsEnvironment, check_row, is_followed
from rl_envs.instructions.plugin import InstructionsConfig

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
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye\nP.S. more", "Bye\nPS: more"),
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


def _asked(name: str, **arguments: Any) -> dict[str, Any]:
    return {"instruction_id_list": [name], "kwargs": [arguments]}


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
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"x": 1}]}, "takes the arguments none, got x"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "1 instructions and 0"),
        (
            {
                "instruction_id_list": ["keywords:frequency"],
                "kwargs": [{"keyword": "a", "frequency": 1, "relation": "over"}],
            },
            "at least",
        ),
        ({"instruction_id_list": "punctuation:no_comma"}, "needs the list"),
        ({"instruction_id_list": [["x"]]}, "there is no check"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "x"}, "must be a list"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [5]}, "must be an object, got 5"),
        (_asked("keywords:existence", keywords="word"), "must be a list of texts, got 'word'"),
        (_asked("keywords:existence", keywords=[]), "must be a list of texts"),
        (_asked("keywords:existence"), "takes the arguments keywords, got none"),
        (_asked("keywords:letter_frequency", letter="", let_frequency=1, let_relation="at least"), "is not empty"),
        (_asked("length_constraints:number_words", num_words="3", relation="at least"), "whole number, got '3'"),
        (_asked("length_constraints:number_words", num_words=2.5, relation="at least"), "whole number, got 2.5"),
        (_asked("length_constraints:number_words", num_words=3, relation=["at least"]), "one of at least"),
    ],
)
def test_a_row_without_usable_instructions_is_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_row(info, InstructionsConfig())
    with pytest.raises(UnusableAnswer, match=says):
        InstructionsEnvironment(InstructionsConfig()).step([Conversation("0", (), info, "x")], [None])


TRICKY: dict[str, list[tuple[dict[str, Any], str, bool]]] = {
    "keywords:existence": [
        ({"keywords": ["C++"]}, "I write c++.", True),
        ({"keywords": ["U.S."]}, "in the u.s.", True),
        ({"keywords": ["don't"]}, "don’t", False),
        ({"keywords": ["sun"]}, "a sunny day", True),
    ],
    "keywords:frequency": [
        ({"keyword": " ab ", "frequency": 2, "relation": "at least"}, "ab,abc", True),
        ({"keyword": "aa", "frequency": 2, "relation": "at least"}, "aaa", False),
    ],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["C++"]}, "I write C++ code", False),
        ({"forbidden_words": ["what?"]}, "What? No", False),
        ({"forbidden_words": ["café"]}, "cafés", True),
        ({"forbidden_words": ["don't"]}, "I don't.", False),
        ({"forbidden_words": ["snake_case"]}, "a snake_case_name", True),
        ({"forbidden_words": ["well"]}, "a well-known one", False),
    ],
    "keywords:letter_frequency": [
        ({"letter": "É", "let_frequency": 2, "let_relation": "at least"}, "Éé", True),
        ({"letter": "!", "let_frequency": 2, "let_relation": "less than"}, "Hi!", True),
    ],
    "length_constraints:number_words": [
        ({"num_words": 2, "relation": "at least"}, "don't", True),
        ({"num_words": 2, "relation": "at least"}, "don’t", True),
        ({"num_words": 2, "relation": "at least"}, "well-known", True),
        ({"num_words": 2, "relation": "at least"}, "snake_case — !", False),
        ({"num_words": 3, "relation": "less than"}, "3.5 %", True),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "***\na\n***\nb\n***", True),
        ({"num_paragraphs": 2}, "a\n****\nb", True),
        ({"num_paragraphs": 1}, "a\n\nb", True),
        ({"num_paragraphs": 2}, "a ****** b", False),
    ],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, "a\n\n'then, b", True),
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "a\n\n**Then** b", False),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "i"}, "I'm here", True),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "i"}, "I’m here", False),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "then"}, "\n\nThen b", False),
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well-known"}, "a\n\nWell-known b\n\n", True),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 1}, "[]", True),
        ({"num_placeholders": 1}, "[a\nb]", False),
        ({"num_placeholders": 2}, "[[a]]", False),
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye, p. s. more", True),
        ({"postscript_marker": "P.S."}, "Bye. P.  S. more", False),
        ({"postscript_marker": "P.P.S"}, "P.P. S", True),
        ({"postscript_marker": "P.P.S."}, "p.p.s. more", True),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 1}, "**bold**\n\n  * a", True),
        ({"num_bullets": 2}, "- a\n---", True),
        ({"num_bullets": 1}, "*\n* b", True),
        ({"num_bullets": 1}, "-", True),
        ({"num_bullets": 1}, "a - b\n• c\n+ d", False),
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "***c***", True),
        ({"num_highlights": 2}, "**c**", False),
        ({"num_highlights": 2}, "* a * b", False),
        ({"num_highlights": 1}, "2*3*4", True),
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": " Section ", "num_sections": 1}, "section 1", False),
        ({"section_spliter": "Section", "num_sections": 2}, "Section1 a Section 2", True),
        ({"section_spliter": "Section", "num_sections": 1}, "Section one", False),
    ],
    "detectable_format:title": [
        ({}, "<< > >>", True),
        ({}, "<<<>>>", False),
        ({}, "<<a\nb>>", False),
        ({}, "a << b >> c", True),
    ],
    "combination:two_responses": [
        ({}, "******\none\n******\ntwo\n******", True),
        ({}, "one****** ******two", False),
        ({}, "one******two******three", False),
    ],
    "combination:repeat_prompt": [({"prompt_to_repeat": " Say it. "}, "\nSAY IT. So", True)],
    "startend:end_checker": [
        ({"end_phrase": " The end."}, '"The end."\n', True),
        ({"end_phrase": "end"}, "end.", False),
    ],
    "startend:quotation": [({}, "“quoted”", False), ({}, '"', False)],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 1, "capital_relation": "at least"}, "NASA's", True),
        ({"capital_frequency": 1, "capital_relation": "at least"}, "I’m here", True),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "WELL-KNOWN", False),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "AND/OR", False),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "DON'T", True),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "CANNOT", True),
        ({"capital_frequency": 2, "capital_relation": "at least"}, "YES,NO", True),
        ({"capital_frequency": 2, "capital_relation": "less than"}, "**U.S.A.** 2024 HTML5x", True),
    ],
    "punctuation:no_comma": [({}, "one، two，three", True)],
}
"""Responses on which plausible checks differ, with IFEval's own results."""

SENTENCES = [
    ("no end", 1),
    ("One. Two! Three? Four", 4),
    ("Mr. Smith met Dr. Lee. They left.", 2),
    ("J. K. Rowling lives in the U.K. today.", 1),
    ("He lives in the U.S. He likes it.", 2),
    ("At 5 p.m. we go. Yes.", 2),
    ("It costs $3.50. Visit www.example.com now.", 2),
    ("Fruit, e.g. apples, is good.", 2),
    ("Cats, dogs, etc. are nice.", 2),
    ("Wait... what? No!", 2),
    ("Well... The end came.", 2),
    ("Hello!! What?! No.", 3),
    ('He said "Hi." Then he left. (It works.) Yes.', 4),
    ("“Hi.” she said.", 2),
    ("1. First\n2. Second", 3),
    ("* one\n* two\n\nthree", 1),
    ("Is it?Yes.", 1),
    ("Acme Inc. was sold on Jan. 5 to Bob Jr. for cash.", 1),
    ("これはペンです。はい。", 1),
]
"""Texts with the number of sentences that Punkt finds in them."""


@pytest.mark.parametrize(
    ("name", "arguments", "response", "follows"), [(name, *case) for name, cases in TRICKY.items() for case in cases]
)
def test_tricky_responses_are_judged_as_by_ifeval(
    name: str, arguments: dict[str, Any], response: str, follows: bool
) -> None:
    assert is_followed(name, response, arguments) == follows


@pytest.mark.parametrize(("text", "number"), SENTENCES)
def test_sentences_are_counted_as_by_punkt(text: str, number: int) -> None:
    name = "length_constraints:number_sentences"
    assert is_followed(name, text, {"num_sentences": number, "relation": "at least"})
    assert is_followed(name, text, {"num_sentences": number + 1, "relation": "less than"})


@pytest.mark.parametrize(
    ("word", "response", "found"),
    [("$100", "It costs $100", True), ("$100", "It costs 100", False), ("(sic", "so (sic", True), ("*", "a*b", True)],
)
def test_a_keyword_that_is_not_a_pattern_is_plain_text(word: str, response: str, found: bool) -> None:
    assert is_followed("keywords:existence", response, {"keywords": [word]}) == found


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "don't"},
            'ends before "\'"',
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "so"},
            "nth_paragraph is 3 of num_paragraphs 2",
        ),
        ("length_constraints:number_words", {"num_words": 1, "relation": "less than"}, r"num_words is 1 \(less than\)"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 0}, "num_paragraphs is 0"),
        ("keywords:frequency", {"keyword": "a", "frequency": 0, "relation": "less than"}, "frequency is 0"),
        ("detectable_format:number_bullet_lists", {"num_bullets": -1}, "num_bullets is -1"),
    ],
)
def test_an_instruction_that_no_response_can_follow_is_refused(name: str, arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"no response can follow instruction '{name}': .*{says}"):
        check_row(_asked(name, **arguments), InstructionsConfig())


@pytest.mark.parametrize(
    ("response", "follows"),
    [
        pytest.param('{"a": 1}', True, id="bare"),
        pytest.param("```json\r\n{}\r\n```", True, id="line ends of Windows"),
        pytest.param("```JSON\n{}", True, id="a fence that is not closed"),
        pytest.param("{}\n```", True, id="a fence that is not opened"),
        pytest.param("```{}```", True, id="a fence in one line"),
        pytest.param("````\n{}\n````", False, id="a longer fence"),
        pytest.param("~~~\n{}\n~~~", False, id="tildes"),
        pytest.param("\ufeff{}", False, id="byte-order mark"),
        pytest.param("Here:\n```json\n{}\n```", False, id="text before it"),
        pytest.param("```json\n{}\n```\nThat is it.", False, id="text behind it"),
        pytest.param("```python\n{}\n```", False, id="another language"),
        pytest.param("NaN", False, id="NaN"),
        pytest.param('{"a": 1, "a": 2}', False, id="a key twice"),
        pytest.param("[" * 100_000, False, id="deep [Liquid4All/ifstruct#5]"),
        pytest.param("9" * 5000, False, id="a huge number"),
        pytest.param('"\\ud83d"', False, id="half of a surrogate pair"),
        pytest.param("\ud83d", False, id="the same, bare"),
    ],
)
def test_json_is_all_of_the_response(response: str, follows: bool) -> None:
    assert is_followed("detectable_format:json_format", response, {}) == follows


PATTERNS = {
    "detectable_content:number_placeholders": r"\[.*?\]",
    "detectable_content:postscript": r"(?m)\s*p\.\s?s\..*$",
    "detectable_format:number_bullet_lists": r"(?m)^\s*(?:\*[^*]|-).*$",
}
"""Patterns that count the same as the checks, in quadratic time."""


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="[]a \n*-pP.sS", max_size=40))
def test_counts_agree_with_plain_patterns(response: str) -> None:
    counts = {name: len(re.findall(pattern, response.lower())) for name, pattern in PATTERNS.items()}
    assume(response.strip())
    number = counts["detectable_content:number_placeholders"]
    assert is_followed("detectable_content:number_placeholders", response, {"num_placeholders": number})
    assert not is_followed("detectable_content:number_placeholders", response, {"num_placeholders": number + 1})
    has_one = counts["detectable_content:postscript"] > 0
    assert is_followed("detectable_content:postscript", response, {"postscript_marker": "P.S."}) == has_one
    number = counts["detectable_format:number_bullet_lists"]
    assert is_followed("detectable_format:number_bullet_lists", response, {"num_bullets": number})


@pytest.mark.parametrize("piece", ["[", "\n", " ", "<<", "*", "* \n", '!"', "a", "p.s.", "```\n", "Section 1"])
def test_every_check_takes_linear_time_on_repeats(piece: str) -> None:
    """In quadratic time one would take longer than a test may."""
    response = "x" + piece * (1_000_000 // len(piece))
    for name, (arguments, _, _) in CASES.items():
        CHECKS[name](response, **arguments)


class TestConformance(EnvironmentSuite):
    def environment(self) -> InstructionsEnvironment:
        return InstructionsEnvironment(InstructionsConfig())

    def conversations(self) -> list[Conversation]:
        info = {"instruction_id_list": ["punctuation:no_comma"]}
        return [Conversation(text, (), info, text) for text in ("a", "a, b", "b")]
