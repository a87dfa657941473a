"""The final answer in a completion, and the known one in a prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from rl_envs.math.form import Equation, read
from rl_envs.math.number import Number, read_number
from rl_envs.math.plugin import AnswerFormat
from rl_envs.math.unit import sized
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
"""The place before an explanation on the same line as the answer."""
_CORRECTION = re.compile(r"\b(?:actually|and|but|correction|instead|no|not|or|rather|sorry|wait)\b", re.IGNORECASE)
_STATED = re.compile(r".*\b(?:is|are|equals?|gets?|gives?|makes?|obtain|have|has)[ \t]+([^\s].*[\d}$].*)")
"""A sentence that states a value, such as "So the total is 12."."""
MAX_LINE = 1000
"""Maximum number of characters at the end of a line that are read as a sentence."""
_SENTENCE = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")


class Found(NamedTuple):
    """An answer as the completion gives it.

    Args:
        text: Without box, dollar signs and full stop.
        in_box: True if it was in a box.
    """

    text: str
    in_box: bool


def extract(completion: str, answer_format: AnswerFormat) -> Found | None:
    """Return the final answer in the requested format; None if there is none."""
    if answer_format == "dapo":
        answer = answer_in(completion)
        return Found(answer, in_box=False) if answer else None
    if answer_format == "choice":
        boxed, letter = last_box(completion), stated_letter(completion)
        return Found(letter, in_box=boxed is not None and letter_of(boxed) == letter) if letter else None
    tagged = None if answer_format == "boxed" else _in_tag(completion)
    boxed = last_box(completion if tagged is None else tagged)
    if answer_format == "boxed" or (boxed is not None and answer_format != "plain"):
        text = "" if boxed is None else _tidy(boxed)
        if (sentence := _SENTENCE.fullmatch(text)) is not None:
            text = _after_marker(sentence[1]) or text
        return Found(text, in_box=True) if text else None
    plain = _after_marker(completion if tagged is None else tagged)
    if tagged is not None:
        plain = plain or _tidy(tagged)
    elif answer_format == "numeric":
        plain = last_number(completion) if plain is None else only_number(plain) or plain
    elif plain is None and (lines := completion.strip().splitlines()):
        stated = _STATED.search(lines[-1][-MAX_LINE:])
        plain = _tidy(stated[1] if stated else lines[-1])
    # A box in the answer was cut off before it closed.
    return Found(plain, in_box=False) if plain and not _BOX.search(plain) else None


def _in_tag(completion: str) -> str | None:
    """Return the contents of the last pair of answer tags; None if there is none, or if it is empty."""
    lower = completion.lower()
    end = lower.rfind(_CLOSED)
    start = lower.rfind(_OPENED, 0, end) if end >= 0 else -1
    inner = completion[start + len(_OPENED) : end].strip() if start >= 0 and len(lower) == len(completion) else ""
    return inner or None


def last_box(text: str) -> str | None:
    """Return the contents of the last closed box, or the innermost of nested ones, in linear time; None if there is
    none."""
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
    """Return the text after the last "answer is" or its like on that line, or on the next if that ends there; None
    without."""
    ends = [marker.end() for marker in _MARKER.finditer(completion)]
    rest = completion[ends[-1] :].lstrip("* \t\r\n") if ends else ""
    if not rest:
        return None
    text = rest.splitlines()[0]
    reason = _REASON.search(text)
    # An explanation after the answer is left out, unless it may correct it.
    if reason is not None and reason.start() > 0 and _CORRECTION.search(text, reason.start()) is None:
        text = text[: reason.start()]
    return _tidy(text)


def _tidy(text: str) -> str:
    text = _ENDINGS.sub("", text.strip().strip("*").strip())
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        body = text.rstrip(".").rstrip()
        if len(body) > len(opening) + len(closing) and body.startswith(opening) and body.endswith(closing):
            text = body[len(opening) : -len(closing)].strip()
    return text[:-1].rstrip() if text.endswith(".") else text


_BARE_LETTER = re.compile(r"[A-Z]|\([A-Z]\)|\[[A-Z]\]|[A-Z][.)]|\\text\s*\{\(?[A-Z]\)?\}")
"""A known answer that makes a row multiple choice if the format is `auto`."""


def known_answers(info: Mapping[str, Any], answer_format: AnswerFormat) -> tuple[tuple[str, ...], AnswerFormat]:
    """Return the right answers of `info["answer"]`, and the format that they decide on if it is `auto`.

    The field holds text, a number, or a list of these; a box around an answer is removed.

    Raises:
        ValueError: If there is none, or it does not fit the format.
    """
    if "answer" not in info:
        raise ValueError(f"the math environment needs an answer in the prompt's info, which has {sorted(info)}")
    given, answers = info["answer"], []
    for answer in given if isinstance(given, list | tuple) else (given,):
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"an answer must be a string or a number, got {answer!r}")
        # CSV files have "nan" for a missing value.
        is_nan = isinstance(answer, str) and answer.strip().lower() == "nan"
        if is_nan or (isinstance(answer, float) and not math.isfinite(answer)):
            raise ValueError(f"an answer must be a finite number, got {answer!r}")
        # `str` refuses integers of more than 4,300 digits.
        text = final_answer(f"{Decimal(answer):f}" if isinstance(answer, int) else str(answer))
        if not text:
            raise ValueError("the answer in the prompt's info is empty")
        answers.append(text)
    if not answers:
        raise ValueError("the answer in the prompt's info is an empty list")
    if answer_format == "auto" and all(_BARE_LETTER.fullmatch(answer) for answer in answers):
        answer_format = "choice"
    if answer_format == "choice":
        letters = [letter_of(answer) for answer in answers]
        if not all(letters):
            raise ValueError(f"answer_format choice needs the letter of an option as the answer, got {tuple(answers)}")
        answers = [letter for letter in letters if letter]
    return tuple(answers), answer_format


# The rest of this module is the verifier of DAPO (arXiv:2503.14476), whose answer after the last `Answer:`, normalised
# as for Minerva (arXiv:2206.14858, appendix D.1), must equal the normalised known one, and numbers in sentences.
MAX_DISTANCE = 300
"""Number of characters at the end of a response that the verifier of DAPO searches for the answer."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
# fmt: off
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", r"\text{}^2",
    r"\text{}^3", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)
# fmt: on
_WRAPPERS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline", "boxed"))


def answer_in(response: str) -> str | None:
    """Return the text after the last `Answer:` on its line; None if there is none near the end."""
    found = _ANSWER.findall(response[-MAX_DISTANCE:])
    return found[-1].strip() if found else None


def normalised(answer: str) -> str:
    """Return an answer without units, filler words, LaTeX wrappers and spaces."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _REMOVED:
        text = text.replace(word, "")
    if (formula := re.search(r"\$(.*?)\$", text)) is not None:
        text = formula[1]
    for wrapper in _WRAPPERS:
        text = wrapper.sub(r"\1", text)
    text = re.sub(r"(frac)([^{])(.)", r"\1{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{])", r"\1{\2}", text).replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


MAX_LENGTH = 5000
"""Number of characters at the end of a completion that are searched for a number."""

_MATH = re.compile(r"[\d\\=+*/^×÷−√π½¼¾|]|^[-–]$|^[b-zA-HJ-Z]$")
_APPLIED = frozenset(["squared", "cubed", "factorial", "times", "plus", "minus", "over", "percent"])
"""Words after a number that make it another one."""


def is_number(text: str) -> bool:
    """Return whether a string is a number as a whole, or an equation that gives one."""
    form = read(text)
    return isinstance(form, Number) or (isinstance(form, Equation) and isinstance(form.values[-1], Number))


def only_number(text: str) -> str | None:
    """Return the number in a sentence that has only one; None if it has none, several, or more mathematics."""
    words, spans = _spans(text)
    return _whole(words, *spans[0]) if len(spans) == 1 else None


def last_number(completion: str) -> str | None:
    """Return the last number of a completion; None if it is part of something else, such as `3x` or `3 or 4`."""
    tail = completion[-MAX_LENGTH:]
    if len(completion) > MAX_LENGTH:
        # A number could be cut.
        tail = tail.partition(" ")[2]
    words, spans = _spans(tail)
    if not spans:
        return None
    start, end = spans[-1]
    is_joined = len(spans) > 1 and start - spans[-2][1] == 1 and words[start - 1] in ("and", "or", "to")
    return None if is_joined else _whole(words, start, end)


def _spans(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the words of a text, and the positions of the first word and after the last of each run that is not
    prose."""
    # Marks of a sentence around a word are removed, except a point before a digit, which begins a decimal.
    stripped = (word.lstrip("*,;:?\"'`").rstrip("*.,;:?\"'`") for word in text.split())
    words = [word for word in stripped if word]
    spans: list[tuple[int, int]] = []
    for index, word in enumerate(words):
        if _MATH.search(word) is not None:
            start = spans.pop()[0] if spans and spans[-1][1] == index else index
            spans.append((start, index + 1))
    return words, spans


def _whole(words: Sequence[str], start: int, end: int) -> str | None:
    span, after = " ".join(words[start:end]), words[end : end + 3]
    for size in range(len(after), 0, -1):
        text = " ".join((span, *after[:size]))
        if read_number(text) is not None:
            return text
    if after and (after[0].casefold() in _APPLIED or any(sized(word.casefold()) is not None for word in after)):
        return None
    return span if is_number(span) else None
