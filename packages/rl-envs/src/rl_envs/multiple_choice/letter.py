"""The letter of an option: as a known answer, and as a completion states it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rl_envs.multiple_choice.tokens import Tokens, read_tokens

# The grammar is over the kinds of tokens (see `tokens`). Every repetition is bounded, so reading takes linear time.
_LABEL = r"(?:o[LWHl]|[LWH])"
_MORE = rf"(?:(?:,?k|,)[tfqo]{{0,2}}{_LABEL}){{0,26}}"
_MORE_UNJUDGED = rf"(?:,?k[tfjqo]{{0,2}}X?{_LABEL}(?![mtc])|,{_LABEL}(?=[,k.\n]|\Z)){{0,26}}"
_SAID = rf"{_LABEL}{_MORE_UNJUDGED}"
_SUBJECT = rf"(?:o[LWHl]|[WH]|(?<!x)L){_MORE}"
_FILL = r"[fjgodnmtq]{0,8}"
_GAP = r"[^.?\nLWHlaneNwiXO]"
_END = r"(?=[.,?\nbu]|\Z)"
_LINE_END = r"(?=\.?(?:\n|\Z))"

_RULES = {
    # "B is correct", "A and B are wrong", "C: right"
    "judged": rf"{_SUBJECT}(?:(?:[mtfjnq]{{0,5}}c|[fjmn]{{0,2}}t)[fjnmtdqr]{{0,6}}[gwa](?![fj]{{0,2}}i)"
    rf"|e?[gw]{_LINE_END}|pc{_END})",
    # "option B, which says so, is the correct one"
    "described": rf"(?:o[LWHl]|[WH]){_GAP}{{1,25}}c[fjmtdqr]{{0,4}}[ga]",
    # "B because", "B, not A"
    "reasoned": rf"(?<=[.\n]){_LABEL}(?=,?b|,?u?n[fr]{{0,3}}{_LABEL})",
    # "Or C." after another statement
    "added": rf"(?<=[.\n])k[tfjq]{{0,3}}{_LABEL}{_LINE_END}",
    # "the answer to this question is B", "Correct: B", a box or a tag, "answer B"
    "called": rf"(?:(?<!w)[ao](?:(?:O|{_GAP}){{0,15}}c[ep]?|{_GAP}{{0,15}}e)\n?|g{{1,2}}e\n?|X\n?[aec]{{0,3}}\n?"
    rf"|a(?=[fj]{{0,3}}[LWH]{_END})){_FILL}(?:{_SAID}|l(?=[.,?\n]|\Z))",
    # "the answer is 12 (B)"
    "behind": rf"(?<!w)[ao]{_GAP}{{0,15}}[ce]{_GAP}{{1,20}}(?:o?W|o[LH]){_LINE_END}",
    # "it must be B", "the correct one is B"
    "referred": rf"(?<!w)p[mtfjnr]{{0,5}}c{_FILL}{_SAID}",
    # "I choose option B"
    "chosen": rf"v[frodgjqe]{{0,5}}{_SAID}",
    # "I think B."
    "thought": rf"h[frpj]{{0,2}}{_LABEL}{_END}",
    # "So B."
    "concluded": rf"(?:j,?){{1,3}}f{{0,3}}{_SAID}{_END}",
    # "which makes B the correct answer"
    "made": rf"y[fo]{{0,2}}{_LABEL}[fd]{{0,3}}(?:c[fd]{{0,2}})?[ga]",
    # "neither A nor B is correct"
    "none": rf"N[frd]{{0,3}}{_LABEL}(?:[,kn]{{1,2}}{_LABEL}){{0,26}}(?:[mf]{{0,2}}c[fjm]{{0,3}}[gwa])?",
    # "not B", "rather than option B"
    "denied": rf"n[fcmtrvodhpgjaz]{{0,6}}{_SAID}",
    # "this corresponds to option B"
    "matched": r"z[fr]{0,3}(?:o[LWHl]|W)",
    # "(B)" as a sentence, "Which one? B."
    "alone": rf"(?<=[.?])(?:W|oL){_LINE_END}|(?<=\?)[LH]{_LINE_END}",
}
_STATEMENT = re.compile("|".join(f"(?P<{name}>{rule})" for name, rule in _RULES.items()))
_TAKEN_BACK = re.compile(r",?(?:u{1,2}[fp]{0,2})?[mt]{0,2}c[fjmq]{0,3}w")
_BUT = re.compile(rf",?u{{1,2}}[fjgodcr]{{0,4}}{_LABEL}")
_LINE = re.compile(r"(?<=\n)(?:[Xajf],?){0,3}(?:o?[LWH]|ol)(?P<mark>[.e]?)(?P<rest>[^\n]*)")
_SPECIAL = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|</?s>|<(?:eos|bos|(?:start|end)_of_turn)>")
"""Special tokens of models, which a saved response may have at its end."""
_ANOTHER_LABEL = re.compile(r"[WH]|L[.e]")
_KNOWN = re.compile(r"\nX?(?:o?[LWHl]\.?|o?(?:[LWHl][.e]|[WH])[^\n,k][^\n]*)\n?")


def letter_of(text: str) -> str | None:
    r"""Return the letter, upper case, of `B`, `(b)`, `B) 12`, `\text{B}` or `Option B`; None for anything else."""
    tokens = read_tokens(text.strip())
    if _KNOWN.fullmatch(tokens.kinds) is None:
        return None
    return next(letter for letter in tokens.letters if letter)


def stated_letter(completion: str, num_choices: int = 26) -> str | None:
    """Return the letter that a completion states as its final answer; None if it states none, or several.

    The last statement counts. A letter that is denied, or part of a condition, of a question or of a list of options,
    is not stated, and "A or B" states none. Tentative words ("it might be B") and lines that begin with a label count
    if nothing firm is said and all of them have the same letter.

    Args:
        completion: Output of a model.
        num_choices: Number of options; letters beyond them are not answers.
    """
    completion = _SPECIAL.sub("\n", completion)
    tokens = read_tokens(completion, num_choices)
    bare, headed, listed = _lines(tokens)
    statements = sorted([*bare, *headed, *_sentences(tokens, listed)], key=lambda each: each.position)
    firm = [statement for statement in statements if not statement.is_weak]
    if any(statement.states for statement in firm):
        return _last(firm)
    weak = frozenset[str]().union(*(statement.letters for statement in statements))
    alone = completion.strip().removesuffix(".").upper()
    if not statements and len(alone) == 1 and alone in tokens.letters:
        return alone  # a small letter is one of an option only if nothing else is said
    return next(iter(weak)) if len(weak) == 1 and not firm else None


@dataclass(frozen=True)
class _Statement:
    """Letters that are said to be the answer, or not to be it.

    Args:
        position: Place among the tokens.
        letters: All letters that it is about.
        states: Whether they are said to be the answer.
        adds: Whether they are said to be so next to what was stated before.
        is_weak: Whether it counts only if nothing firm is said.
    """

    position: int
    letters: frozenset[str]
    states: bool = True
    adds: bool = False
    is_weak: bool = False


def _last(statements: Sequence[_Statement]) -> str | None:
    """The single letter of the last statement that is not taken back."""
    current: frozenset[str] = frozenset()
    for statement in statements:
        if not statement.states:
            current -= statement.letters
        elif statement.adds:
            current |= statement.letters
        else:
            current = statement.letters
    return next(iter(current)) if len(current) == 1 else None


def _sentences(tokens: Tokens, listed: frozenset[int]) -> Iterator[_Statement]:
    kinds = tokens.kinds
    conditional, retracting, asked = _contexts(kinds)
    stated: frozenset[str] = frozenset()
    position = 0
    while (found := _STATEMENT.search(kinds, position)) is not None:
        start, position = found.span()
        rule, span = str(found.lastgroup), found[0]
        letters = _letters(tokens, start, position)
        is_listed = rule != "judged" and not listed.isdisjoint(range(start, position))
        taken_back = _TAKEN_BACK.match(kinds, position)
        if is_listed or taken_back or conditional[start] or asked[position - 1]:
            continue
        is_negated, is_wrong = "n" in span or rule == "none", rule in ("judged", "none") and span[-1] == "w"
        if is_negated and is_wrong:
            continue  # "B is not wrong" says little
        if is_negated or is_wrong:
            # "B is wrong" may explain why B is the answer, unless it takes back what was stated before
            if rule != "judged" or retracting[start] or (letters & stated and not _is_reason(kinds, start, position)):
                yield _Statement(start, letters, states=False)
            if is_negated and (but := _BUT.match(kinds, position)) is not None:
                yield _Statement(position, _letters(tokens, *but.span()))
                position = but.end()
        else:
            stated |= letters
            yield _Statement(
                start, letters, adds="q" in span or rule == "added", is_weak="t" in span or rule == "matched"
            )


def _is_reason(kinds: str, start: int, end: int) -> bool:
    """Return whether a verdict is the reason for an answer: "The answer is B because B is wrong", "B is wrong, as
    asked"."""
    sentence = max(kinds.rfind(mark, 0, start) for mark in ".?\n") + 1
    return "b" in kinds[sentence:start] or kinds.startswith(",b", end)


def _lines(tokens: Tokens) -> tuple[list[_Statement], list[_Statement], frozenset[int]]:
    """Lines that are a label, lines of a label and text, and the positions of labels that are parts of lists."""
    bare: list[int] = []
    headed: list[int] = []
    for found in _LINE.finditer(tokens.kinds):
        at = found.start("mark") - 1
        if not found["rest"]:
            bare.append(at)
        elif (found["mark"] or tokens.kinds[at] in "WH") and not _ANOTHER_LABEL.search(found["rest"]):
            headed.append(at)
    listed = _in_runs(tokens, bare) | _in_runs(tokens, headed)
    return (
        [_Statement(at, _letters(tokens, at, at + 1)) for at in bare if at not in listed],
        [_Statement(at, _letters(tokens, at, at + 1), is_weak=True) for at in headed if at not in listed],
        listed,
    )


def _in_runs(tokens: Tokens, labels: Sequence[int]) -> frozenset[int]:
    """Labels that follow one another in the alphabet, as those of all options do."""
    pairs = ((a, b) for a, b in pairwise(labels) if ord(tokens.letters[b]) == ord(tokens.letters[a]) + 1)
    return frozenset(label for pair in pairs for label in pair)


def _contexts(kinds: str) -> tuple[list[bool], list[bool], list[bool]]:
    """For each token whether its clause is a condition, its sentence takes something back, and it is a question."""
    conditional, retracting, asked = [], [], []
    is_conditional = is_retracting = False
    for kind in kinds:
        is_conditional = kind == "i" or (is_conditional and kind not in ",.?\n")
        is_retracting = kind == "s" or (is_retracting and kind not in ".?\n")
        conditional.append(is_conditional)
        retracting.append(is_retracting)
    is_asked = False
    for kind in reversed(kinds):
        is_asked = kind == "?" or (is_asked and kind not in ".\n")
        asked.append(is_asked)
    return conditional, retracting, asked[::-1]


def _letters(tokens: Tokens, start: int, end: int) -> frozenset[str]:
    return frozenset(letter for letter in tokens.letters[start:end] if letter)
