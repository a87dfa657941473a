"""The final answer in a completion."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_envs.math import dapo
from rl_envs.math.config import AnswerFormat
from rl_envs.math.prose import last_number, only_number
from rl_envs.multiple_choice.letter import letter_of, stated_letter

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE_BOX = re.compile(r"[-+]?\d[\d.,/]*|[A-Za-z](?![A-Za-z])")
"""The contents of a box without braces, which takes one sign in LaTeX; models put a whole number there."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GAP = r"[ \t]{0,8}(?:\*\*)?[ \t]{0,8}"
_MARKER = re.compile(
    r"####"
    rf"|\banswer\b(?:[ \t]{{1,8}}(?:to|for|of|here)\b[^\n.:=]{{0,80}}?)?{_GAP}(?:is|are|[:=])[ \t]{{0,8}}[:=]?"
    rf"|\bfinal(?:[ \t]{{1,8}}result)?\b{_GAP}[:=]"
    rf"|\b(?:réponse|antwort|lösung|ergebnis|respuesta|resposta|risposta|antwoord|ответ|odpowiedź|cevap|jawaban(?:nya)?"
    rf"|svar(?:et)?)(?:[ \t]{{1,8}}(?:final|finale))?{_GAP}"
    r"(?:[:=]|—|-[ \t]|(?:est|ist|lautet|es|é|è|is|to|adalah|är|er)\b)[ \t]{0,8}:?"
    rf"|(?:答案|正解|答え|答|정답|답|उत्तर|الجواب|الإجابة|đáp án)"
    rf"{_GAP}(?:[:：]|是|为|為|は|은|है|هو|هي|là)[ \t]{{0,8}}[:：]?",
    re.IGNORECASE,
)
_ENDINGS = re.compile(r"(?:です|である|입니다|이다|है)[。．｡.]?$|[。．｡]$")
_OPENED, _CLOSED = "<answer>", "</answer>"
_CLAUSE = r"as|assuming|because|giving|given|hence|in total|making|meaning|since|so|therefore|thus|when|where|which"
_REASON = re.compile(
    rf"(?:,|;|\s(?=because|since|which))\s*(?=(?:{_CLAUSE})\b)"
    rf"|\.\s+(?=(?:{_CLAUSE}|he|i|it|she|that|the|they|this|we)\b)",
    re.IGNORECASE,
)
"""Before what explains an answer on the same line."""
_CORRECTION = re.compile(r"\b(?:actually|and|but|correction|instead|no|not|or|rather|sorry|wait)\b", re.IGNORECASE)
_STATED = re.compile(r".*\b(?:is|are|equals?|gets?|gives?|makes?|obtain|have|has)[ \t]+([^\s].*[\d}$].*)")
"""A sentence that states a value, such as "So the total is 12."."""
MAX_LINE = 1000
"""Longest end of a line that is read as a sentence."""
_SENTENCE = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Found:
    """An answer as the completion gives it.

    Args:
        text: Without box, dollar signs and full stop.
        in_box: True if it stood in a box.
    """

    text: str
    in_box: bool


def extract(completion: str, answer_format: AnswerFormat) -> Found | None:
    """Return the final answer in the requested format; None if there is none."""
    if answer_format == "dapo":
        answer = dapo.answer_in(completion)
        return Found(answer, in_box=False) if answer else None
    if answer_format == "choice":
        boxed, letter = last_box(completion), stated_letter(completion)
        return Found(letter, in_box=boxed is not None and letter_of(boxed) == letter) if letter else None
    tagged = None if answer_format == "boxed" else _in_tag(completion)
    boxed = last_box(completion if tagged is None else tagged)
    if answer_format == "boxed" or (boxed is not None and answer_format != "plain"):
        text = _said_in(_tidy(boxed)) if boxed is not None else ""
        return Found(text, in_box=True) if text else None
    plain = (
        _plain(completion, is_number=answer_format == "numeric")
        if tagged is None
        else _after_marker(tagged) or _tidy(tagged)
    )
    if not plain or _BOX.search(plain):  # one that was cut off before it closed
        return None
    return Found(plain, in_box=False)


def _plain(completion: str, *, is_number: bool) -> str | None:
    marked = _after_marker(completion)
    if not is_number:
        return _last_line(completion) if marked is None else marked
    if marked is not None:
        return only_number(marked) or marked
    return last_number(completion)


def _in_tag(completion: str) -> str | None:
    """Return the contents of the last pair of answer tags; None if there is none, or if it is empty."""
    lower = completion.lower()
    end = lower.rfind(_CLOSED)
    start = lower.rfind(_OPENED, 0, end) if end >= 0 else -1
    inner = completion[start + len(_OPENED) : end].strip() if start >= 0 and len(lower) == len(completion) else ""
    return inner or None


def last_box(text: str) -> str | None:
    """The contents of the last closed box, of nested ones the innermost; None if there is none. Linear in the text."""
    boxes = [match.end() for match in _BOX.finditer(text)]
    starts = {end for end in boxes if text[end : end + 1] == "{"}
    bare = next((found for end in reversed(boxes) if (found := _BARE_BOX.match(text, end)) is not None), None)
    if not starts:
        return None if bare is None else bare[0].rstrip(".,")
    opened: list[int] = []
    closed: dict[int, int] = {}
    for brace in _BRACE.finditer(text, min(starts)):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start in starts:
                closed[start] = brace.start()
    last = max(closed, default=-1)
    if bare is not None and bare.start() > last:
        return bare[0].rstrip(".,")
    if not closed:
        return None
    return text[last + 1 : closed[last]]


def final_answer(known: str) -> str:
    """Return a known answer without the solution, phrase, box and dollar signs that a dataset may have around it."""
    boxed = last_box(known)
    return _tidy(boxed) if boxed is not None else _after_marker(known) or _tidy(known)


def _after_marker(completion: str) -> str | None:
    """The text after the last "answer is" or its like on that line, or on the next if that ends there; None without."""
    marker = None
    for marker in _MARKER.finditer(completion):  # noqa: B007  # the last one counts
        pass
    rest = "" if marker is None else completion[marker.end() :].lstrip("* \t\r\n")
    return _tidy(_without_reason(rest.splitlines()[0])) if rest else None


def _without_reason(text: str) -> str:
    """An answer without the explanation after it, unless that may correct it."""
    reason = _REASON.search(text)
    is_plain = reason is not None and reason.start() > 0 and _CORRECTION.search(text, reason.start()) is None
    return text[: reason.start()] if reason is not None and is_plain else text


def _said_in(boxed: str) -> str:
    r"""The answer of a box that holds a sentence, such as `\text{The answer is 4}`; else the box."""
    sentence = _SENTENCE.fullmatch(boxed)
    return boxed if sentence is None else _after_marker(sentence[1]) or boxed


def _last_line(completion: str) -> str:
    lines = completion.strip().splitlines()
    stated = _STATED.search(lines[-1][-MAX_LINE:]) if lines else None
    return _tidy(stated[1] if stated else lines[-1]) if lines else ""


def _tidy(text: str) -> str:
    text = _ENDINGS.sub("", text.strip().strip("*").strip())
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        body = text.rstrip(".").rstrip()
        if len(body) > len(opening) + len(closing) and body.startswith(opening) and body.endswith(closing):
            text = body[len(opening) : -len(closing)].strip()
    return text[:-1].rstrip() if text.endswith(".") else text
