"""Checks of instructions, by the names of IFEval (arXiv:2311.07911); those that need no language model or corpus.

A response follows an instruction if it does for IFEval, also where that is surprising: `don't` has two words, and a
keyword is a regular expression. There are three exceptions: a keyword that is not a valid pattern, or does not find
itself (`$100`), is plain text; sentences are counted by `tokens.num_sentences`; JSON is strict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rl_core.model_json import MalformedJson, read_model_json
from rl_envs.instructions.tokens import num_sentences as sentences_in
from rl_envs.instructions.tokens import words_of

Check = Callable[..., bool]

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "at least": lambda count, most: count >= most,
    "less than": lambda count, most: count < most,
    "at most": lambda count, most: count <= most,
}


def _compare(count: float, relation: str, number: float) -> bool:
    return RELATIONS[relation](count, number)


def _pattern(word: str, boundary: str = "") -> re.Pattern[str]:
    """Return the pattern of a keyword; its plain text if it is not a pattern, or not one that finds itself."""
    try:
        pattern = re.compile(f"{boundary}{word}{boundary}", re.IGNORECASE)
    except re.error:
        pattern = None
    if pattern is None or pattern.search(word) is None:
        return re.compile(f"{boundary}{re.escape(word)}{boundary}", re.IGNORECASE)
    return pattern


def _existence(response: str, keywords: list[str]) -> bool:
    return all(_pattern(word).search(response) for word in keywords)


def _frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(_pattern(keyword.strip()).findall(response)), relation, frequency)


def _forbidden(response: str, forbidden_words: list[str]) -> bool:
    return not any(_pattern(word, r"\b").search(response) for word in forbidden_words)


def _letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(response.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _number_words(response: str, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", response)), relation, num_words)


def _number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    return _compare(sentences_in(response), relation, num_sentences)


def _number_paragraphs(response: str, num_paragraphs: int) -> bool:
    parts = _parts(re.split(r"\s?\*\*\*\s?", response))
    return parts is not None and len(parts) == num_paragraphs


def _first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in response.split("\n\n")]
    number = sum(map(bool, paragraphs))
    # a blank paragraph counts for the place of the word, and not for the number of paragraphs
    if number != num_paragraphs or not 1 <= nth_paragraph <= number or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(f"[{WORD_ENDS}]", word)[0].lower() == first_word.lower()


def _placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def _postscript(response: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return (_POSTSCRIPTS.get(marker) or _pattern(marker)).search(response) is not None


def _bullets(response: str, num_bullets: int) -> bool:
    return len(re.findall(r"(?m)^[^\S\n]*(?:\*[^*]|-).*$", response)) == num_bullets


def _constrained(response: str) -> bool:
    return any(f"My answer is {answer}." in response for answer in ("yes", "no", "maybe"))


def _highlights(response: str, num_highlights: int) -> bool:
    # the text of one in three asterisks counts twice
    found = [*re.findall(r"\*([^\n*]*)\*", response), *re.findall(r"\*\*([^\n*]*)\*\*", response)]
    return sum(bool(text.strip()) for text in found) >= num_highlights


def _sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{_pattern(section_spliter.strip()).pattern}\s?\d+", response)) >= num_sections


def _is_json(response: str) -> bool:
    text = re.sub(r"^```(?:json|Json|JSON)?", "", response.strip()).removesuffix("```")
    try:
        read_model_json(text.strip())
    except MalformedJson:
        return False
    return True


def _title(response: str) -> bool:
    titles = (line[max(line.find("<<"), 0) : line.rfind(">>") + 2] for line in response.split("\n") if "<<" in line)
    return any(len(title) > 4 and title.lstrip("<").rstrip(">").strip() for title in titles)


def _two_responses(response: str) -> bool:
    parts = _parts(response.split("******"))
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _parts(parts: list[str]) -> list[str] | None:
    """Return the parts of a response that is split, without empty ones at its ends; None if another one is empty."""
    stripped = [part.strip() for part in parts]
    return [part for part in stripped if part] if all(stripped[1:-1]) else None


def _repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(response: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(map(str.isupper, words_of(response))), capital_relation, capital_frequency)


WORD_ENDS = ".,?!'\""
"""Characters that end the first word of a paragraph."""
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE), "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE)}
"""Patterns of the markers that IFEval asks for, which may be anywhere in a line."""

CHECKS: Mapping[str, Check] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda response: response.isupper(),
    "change_case:english_lowercase": lambda response: response.islower(),
    "punctuation:no_comma": lambda response: "," not in response,
}
"""Checks by the name of their instruction; each takes the response and the instruction's arguments."""
