"""Checks of instructions, by the names of IFEval (arXiv:2311.07911); those that need no language model or corpus.

Words are runs of letters, digits and apostrophes, where IFEval uses nltk's tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rl_core.model_json import MalformedJson, read_model_json
from rl_envs.fences import fenced_blocks

Check = Callable[..., bool]

_WORD = re.compile(r"[\w']+")
RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "at least": lambda count, most: count >= most,
    "less than": lambda count, most: count < most,
    "at most": lambda count, most: count <= most,
}


def _compare(count: float, relation: str, number: float) -> bool:
    return RELATIONS[relation](count, number)


def _occurrences(word: str, response: str) -> int:
    return len(re.findall(rf"\b{re.escape(word)}\b", response, re.IGNORECASE))


def _existence(response: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(word), response, re.IGNORECASE) for word in keywords)


def _frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword), response, re.IGNORECASE)), relation, frequency)


def _forbidden(response: str, forbidden_words: list[str]) -> bool:
    return not any(_occurrences(word, response) for word in forbidden_words)


def _letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def _number_words(response: str, num_words: int, relation: str) -> bool:
    return _compare(len(_WORD.findall(response)), relation, num_words)


def _number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", response.strip()) if part]
    return _compare(len(sentences), relation, num_sentences)


def _number_paragraphs(response: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    inner = parts[1:-1]
    return all(inner) and sum(1 for part in parts if part) == num_paragraphs


def _first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\n", response) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    words = _WORD.findall(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def _postscript(response: str, postscript_marker: str) -> bool:
    marker = r"\s*".join(map(re.escape, postscript_marker.lower().replace(" ", "")))
    return re.search(rf"(?m)^[^\S\n]*{marker}", response.lower()) is not None


def _bullets(response: str, num_bullets: int) -> bool:
    return len(re.findall(r"(?m)^[^\S\n]*(?:\*(?!\*)|-)\s*+\S", response)) == num_bullets


def _constrained(response: str) -> bool:
    return any(f"My answer is {answer}." in response for answer in ("yes", "no", "maybe"))


def _highlights(response: str, num_highlights: int) -> bool:
    bold = [text for text in re.findall(r"\*\*([^\n*]+)\*\*", response) if text.strip()]
    plain = re.sub(r"\*\*[^\n*]*\*\*", "", response)
    italic = [text for text in re.findall(r"\*([^\n*]+)\*", plain) if text.strip()]
    return len(bold) + len(italic) >= num_highlights


def _sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", response)) - 1 >= num_sections


def _is_json(response: str) -> bool:
    text = response.strip().removeprefix("\ufeff")
    blocks = list(fenced_blocks(text))
    if len(blocks) == 1 and text.startswith(("```", "~~~")):
        language, body = blocks[0]
        is_whole = text.endswith(("```", "~~~")) and text.count("\n") == body.count("\n") + 1
        text = body if is_whole and language in ("json", "") else text
    elif text.startswith("```") and text.endswith("```"):
        text = re.sub(r"^```(?:json)?|```$", "", text, flags=re.IGNORECASE)
    try:
        read_model_json(text.strip())
    except MalformedJson:
        return False
    return True


def _title(response: str) -> bool:
    lines = (line for line in response.split("\n") if "<<" in line)
    return any(line[line.find("<<") + 2 : max(0, line.rfind(">>"))].strip("<> ") for line in lines)


def _two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(response: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in _WORD.findall(response)), capital_relation, capital_frequency)


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
