"""Instructions that a program can check, and words and sentences as nltk's tokenizers for English find them.

IFEval counts words and sentences with nltk. Sentences follow the decisions of the Punkt model (Kiss and Strunk, 2006)
by rules and short lists, without its statistics on the case of words, which decide about a capitalised word after an
abbreviation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rl_core.rollouts.model_json import MalformedJson, read_model_json

Check = Callable[..., bool]

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "at least": lambda count, most: count >= most,
    "less than": lambda count, most: count < most,
    "at most": lambda count, most: count <= most,
}


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
    return RELATIONS[relation](len(_pattern(keyword.strip()).findall(response)), frequency)


def _forbidden(response: str, forbidden_words: list[str]) -> bool:
    return not any(_pattern(word, r"\b").search(response) for word in forbidden_words)


def _letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return RELATIONS[let_relation](response.lower().count(letter.strip().lower()), let_frequency)


def _number_words(response: str, num_words: int, relation: str) -> bool:
    return RELATIONS[relation](len(re.findall(r"\w+", response)), num_words)


def _number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    return RELATIONS[relation](count_sentences(response), num_sentences)


def _number_paragraphs(response: str, num_paragraphs: int) -> bool:
    parts = _parts(re.split(r"\s?\*\*\*\s?", response))
    return parts is not None and len(parts) == num_paragraphs


def _first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in response.split("\n\n")]
    number = sum(map(bool, paragraphs))
    # A blank paragraph counts for the place of the word, and not for the number of paragraphs.
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
    # A text in three asterisks counts twice.
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
    return RELATIONS[capital_relation](sum(map(str.isupper, words_of(response))), capital_frequency)


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


_ABBREVIATIONS = """
adm col dr gen lt maj messrs mr mrs ms prof rep reps sen sr jr st
jan feb aug sep sept oct nov dec fri tues wed
ala ariz calif colo conn fla ga ill kan ky mich minn nev okla ore pa tenn va vt wash wis
bros co corp cos inc ltd ave ct ft mg ok vs yr
c d e f g h k l m n p r s t v w
a.m p.m a.d ph.d u.s u.k u.n u.s.a u.s.s.r d.c n.y n.j n.c s.c n.h n.m n.d l.a m.b.a
"""
"""Words before a period that ends no sentence. The model does not know others, such as `e.g.` and `etc.`."""
_KNOWN = frozenset(_ABBREVIATIONS.split())
_STARTERS = """
according although among both but despite even he however i if in indeed instead it many meanwhile moreover most
nevertheless nonetheless nor since so some the there these they this though thus under when while yet
"""
"""Words that begin a sentence after an abbreviation or an ellipsis, if they are capitalised."""
_STARTING = frozenset(_STARTERS.split())
_INITIALS = frozenset("ijoquxyz")
"""Letters with a period that belong to a name if a capitalised word follows; others are numbers of a list."""
_ENDS = re.compile(r"[.!?]+")
_CLOSING = re.compile(r"[\"')\]}”’»]*")
_AFTER_END = frozenset(")\"';}]*:@({[")
"""Characters that may follow the end of a sentence without a space."""
_OPENING = "\"'([{“‘«*_`#<>-"
_WORD = re.compile(r"\w[\w'-]*")

_SEPARATE = re.compile(r"[«»“”‘’„`\"?!;@#$%&*\[\](){}<>]+|--|\.{2,}|[:,](?!\d)")
_CLITIC = re.compile(r"(?<=[^' ])(?='(?:[sSmMdD]|ll|LL|re|RE|ve|VE) )|(?<=[^' ])(?=n't |N'T )")
_FUSED = re.compile(r"\b(can(?=not\b)|gim(?=me\b)|gon(?=na\b)|got(?=ta\b)|lem(?=me\b)|wan(?=na\s))", re.IGNORECASE)


def count_sentences(text: str) -> int:
    """Return the number of sentences."""
    words = text.split()
    following = [*words[1:], ""]
    return bool(words) + sum(map(_num_ends, words, following))


def words_of(text: str) -> list[str]:
    """Return the words as nltk's word tokenizer splits them: a hyphen does not split a word, a clitic such as `'s` is a
    word."""
    plain = f" {' '.join(_SEPARATE.sub(' ', text).split())} "
    return _FUSED.sub(r"\1 ", _CLITIC.sub(" ", plain)).split()


def _num_ends(word: str, following: str) -> int:
    """Return the number of sentences that end in a word, or with it if another word follows."""
    found = begin = 0
    for end in _ENDS.finditer(word):
        closed = _CLOSING.match(word, end.end()).end()  # type: ignore[union-attr]  # it matches the empty text
        if closed < len(word) and (word[end.end()] not in _AFTER_END or word[closed] in ".!?"):
            continue
        rest = word[closed:] or following
        if rest and _ends(word[begin : end.start()].lstrip(_OPENING).lower(), end[0], rest):
            found, begin = found + 1, closed
    return found


def _ends(before: str, marks: str, rest: str) -> bool:
    """Return whether marks end a sentence, after a word and before the rest of the text."""
    if marks[-1] != ".":
        return True
    word = _WORD.search(rest)
    starts = rest[0] in "\"'“‘" or (word is not None and word[0][0].isupper() and word[0].lower() in _STARTING)
    if len(marks) > 1:
        return starts
    if before in _KNOWN or before.rpartition("-")[2] in _KNOWN:
        return starts and len(before) > 1
    if before.isdigit() or (len(before) == 1 and before.isalpha()):
        return not (rest[0].islower() or (rest[0].isupper() and not starts and before in _INITIALS))
    return True
