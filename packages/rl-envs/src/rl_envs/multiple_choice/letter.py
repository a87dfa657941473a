"""The letter of an option: as a known answer, and as a completion states it.

A text is read in two steps. Each word and sign becomes one character for its role (`_VOCABULARY`, `_SIGNS`), and
regular expressions over these characters (`_RULES`) find the statements, such as "the answer is B", "B is wrong" and
"I choose option B".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

# A letter that may be an option has the role `L` if it is bare and capital, `l` if it is bare, `W` if it is enclosed
# as in `(b)`, or `H` if it is before a bracket as in `B)`. Further roles are `X` for a box or tag, `d` for an article,
# `e` for a colon or an arrow, and `x` for anything else.
_VOCABULARY = {
    # These words are the thing that the question asks for.
    "a": "answer answers solution conclusion ans antwort réponse respuesta risposta resposta ответ "
    "答案 答え 正解 正答 정답",
    # These nouns come before a letter.
    "o": "option choice letter alternative statement item selection response opción opção opzione вариант 选项",
    # The same nouns in the plural introduce a list of all letters.
    "O": "options choices alternatives statements letters candidates possibilities format",
    # These words refer to the answer.
    "p": "it this that which one",
    # These words are forms of "to be".
    "c": "is are was be being equals ist lautet est es è é это 是 为 為 は",
    # These words express certainty.
    "m": "must should would will shall has have to ought",
    # These words are tentative.
    "t": "could might may can perhaps maybe possibly seems seem appears looks presumably either",
    # These words deny several letters.
    "N": "neither none",
    # These words deny a letter.
    "n": "not no never nor nobody except excluding exclude excludes eliminate eliminates eliminated "
    "eliminating reject rejects rejecting discard without unlike avoid non than almost "
    "hardly barely nearly partially partly 不",
    # These words express a belief.
    "h": "think believe say guess feel suspect reckon conclude deduce infer assert",
    # These words express a choice.
    "v": "choose chose choosing select selected selecting pick picked picking go going went opt opting settle settled "
    "settling vote mark leaves leaving left 选 選 选择",
    # These words follow a word of choice.
    "r": "with on for upon to us me only",
    # These words make a letter the answer.
    "y": "makes making make confirms confirming",
    # These words say that something matches a letter.
    "z": "matches match corresponds correspond corresponding matching aligns fits points",
    # These words say that a letter is right.
    "g": "correct right best final accurate winner richtig richtige correcta correcte correta "
    "bonne правильный 正确 最终",
    # These words say that a letter is wrong.
    "w": "wrong incorrect false invalid untrue inaccurate eliminated excluded impossible distractor distractors "
    "inconsistent implausible out falsch incorrecta 错误",
    # These words introduce a conclusion.
    "j": "so thus hence therefore ergo consequently accordingly finally then overall donc luego 故 所以 因此 应 應 该",
    # These words introduce a reason.
    "b": "because since as due given denn weil porque",
    # These words change nothing.
    "f": "the an my our your i chosen most likely probably clearly definitely certainly obviously surely indeed simply "
    "just actually now here of very more single first second third fourth next following we am sure confident "
    "die der la le el il o lo c",
    # These words join letters.
    "k": "and or und oder et ou y 和 或",
    # These words introduce a contrast.
    "u": "but rather",
    # These words begin a condition, or a thought that was given up.
    "i": "if unless whether suppose supposing assume assuming imagine were initially thought seemed tempted tempting "
    "glance trap pretend doubt doubts unlikely 如果",
    # These words take something back.
    "s": "wait hmm oops sorry mistake however correction",
    # These words are about more than one letter.
    "q": "also too equally both between",
}
_KINDS = {word: kind for kind, words in _VOCABULARY.items() for word in words.split()}
_PHRASES = {
    **dict.fromkeys(
        ["rather than", "instead of", "other than", "rule out", "rules out", "ruled out", "ruling out"], "n"
    ),
    **dict.fromkeys(["no doubt", "without a doubt", "without doubt", "no question"], "f"),
    **dict.fromkeys(["no way", "false that", "wrong that", "incorrect that", "untrue that"], "i"),
    **dict.fromkeys([f"if i had to {verb}" for verb in ("guess", "choose", "pick", "say")], "j"),
    **dict.fromkeys(["remaining is", "remaining one is"], "ac"),
    "ans.": "ae",
}
"""Roles of words that mean something else together."""
_SIGNS = {
    **dict.fromkeys([":", "：", "=", "->", "=>", "-->", "→", "⇒", "⟶", "➡", "—"], "e"),
    **dict.fromkeys([",", "，", "、"], ","),
    **dict.fromkeys([".", "。", ";", "；", "!", "！", "…"], "."),
    **dict.fromkeys(["?", "？"], "?"),
    **dict.fromkeys(["/", "&"], "k"),
    **dict.fromkeys(["✓", "✔", "✅", "☑"], "g"),
    **dict.fromkeys(["✗", "✘", "❌"], "w"),
    "∴": "j",
}
_NAMED_TAGS = "answer|final_answer|ans|choice|option"
_OPENING = (
    rf"\\(?:text\w{{0,6}}|math\w{{0,6}}|mbox|boxed|fbox)\s?\{{|\\[(\[{{]|<(?:{_NAMED_TAGS}|b|strong|em|i)>"
    r"""|[(\[{“”‘’"'`*_$（【「『«„]|<(?=[A-Z]>)"""
)
_CLOSING = rf"""\\[)\]}}]|</(?:{_NAMED_TAGS}|b|strong|em|i)>|[)\]}}“”‘’"'`*_$）】」』»]|(?<=<[A-Z])>"""
_CJK = "|".join(sorted((word for word in _KINDS if word > "\u2e80"), key=len, reverse=True))
_WORD = r"A-Za-zÀ-ɏЀ-ӿ0-9"
_PHRASE = "|".join(re.escape(phrase).replace(r"\ ", "[ ]") for phrase in _PHRASES)
_TOKEN = re.compile(
    rf"""
    (?P<line>[ \t\r\f\v]*+\n\s*+(?:[-*•>\#]{{1,6}}[ \t]++)*)
  | (?P<space>\s++)
  | (?P<phrase>(?i:{_PHRASE})(?![{_WORD}]))
  | (?P<open>(?:(?:{_OPENING})[ \t]?)*)(?P<letter>[A-Za-z])(?![{_WORD}])(?P<close>(?:[.:]?[ \t]?(?:{_CLOSING}))*)
  | (?P<number>\d++(?:[.,]\d++)*(?![.,]\d|[{_WORD}_]))
  | (?P<word>[{_WORD}][{_WORD}_]*+(?:['’-][{_WORD}]++)*)
  | (?P<cjk>{_CJK})
  | (?P<marks>(?:{_OPENING})+)
  | (?P<closing>(?:{_CLOSING})+)
  | (?P<sign>-->|->|=>|\.(?![{_WORD}])|[:：=→⇒⟶➡—,，、。;；!！…?？/&✓✔✅☑✗✘❌∴]|(?<=\s)[-–](?=\s))
  | (?P<command>\\[A-Za-z]*+)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CUE_MARK = re.compile(rf"boxed|fbox|<(?:{_NAMED_TAGS})>")
_NOT_AN_OPTION = re.compile(
    r"[ \t]?(?:=(?!>)|[+^<>~|%]|\\(?!text|quad|[\])},;! ])[A-Za-z])|[-–'’#_][A-Za-z0-9#+]|\.[A-Za-z](?![A-Za-z])"
)
"""The text after a letter that is a variable, a degree of a scale, or a part of a compound or an abbreviation."""
_NARROW = {0xFF21 + index: chr(ord("A") + index) for index in range(26)}
"""Full-width capital letters."""
_AFTER_A = re.compile(r"[ \t]++([A-Za-z]++)")
_VERBS_AFTER_A = re.compile("matches|fits|describes|says|states|shows|gives|satisfies|works|has|does")

# Every repetition is bounded, so reading takes linear time.
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
    roles, letters = _roles(text.strip(), num_choices=26)
    return next(letter for letter in letters if letter) if _KNOWN.fullmatch(roles) else None


def stated_letter(completion: str, num_choices: int = 26) -> str | None:
    """Return the letter that a completion states as its final answer; None if it states none, or several.

    The last statement counts. A letter that is denied, or part of a condition, of a question or of a list of options,
    is not stated, and "A or B" states none. Tentative words ("it might be B") and lines that begin with a label count
    if nothing is firm and all of them have the same letter.

    Args:
        completion: Output of a model.
        num_choices: Number of options; letters beyond them are not answers.
    """
    completion = _SPECIAL.sub("\n", completion)
    roles, letters = _roles(completion, num_choices)
    lines, listed = _lines(roles, letters)
    statements = sorted([*lines, *_sentences(roles, letters, listed)], key=lambda each: each.position)
    firm = [statement for statement in statements if not statement.is_weak]
    if any(statement.states for statement in firm):
        # The last firm statement counts, without the letters that are taken back after it.
        current: frozenset[str] = frozenset()
        for statement in firm:
            if not statement.states:
                current -= statement.letters
            else:
                current = statement.letters | (current if statement.adds else frozenset())
        return next(iter(current)) if len(current) == 1 else None
    weak = frozenset[str]().union(*(statement.letters for statement in statements))
    alone = completion.strip().removesuffix(".").upper()
    if not statements and len(alone) == 1 and alone in letters:
        return alone  # A small letter is the letter of an option only without any other statement.
    return next(iter(weak)) if len(weak) == 1 and not firm else None


class _Statement(NamedTuple):
    """Letters that a phrase states as the answer, or rules out.

    Args:
        position: Place among the roles.
        letters: All letters that it is about.
        states: True if it states them as the answer.
        adds: True if it states them in addition to letters that were stated before.
        is_weak: True if it counts only without a firm statement.
    """

    position: int
    letters: frozenset[str]
    states: bool = True
    adds: bool = False
    is_weak: bool = False


def _sentences(roles: str, letters: Sequence[str], listed: frozenset[int]) -> Iterator[_Statement]:
    # For each role: its clause is a condition, its sentence takes something back, or its sentence is a question.
    conditional, retracting = _until(roles, "i", ",.?\n"), _until(roles, "s", ".?\n")
    asked = _until(roles[::-1], "?", ".\n")[::-1]
    stated: frozenset[str] = frozenset()
    position = 0
    while (found := _STATEMENT.search(roles, position)) is not None:
        start, position = found.span()
        rule, span = str(found.lastgroup), found[0]
        about = frozenset(filter(None, letters[start:position]))
        is_listed = rule != "judged" and not listed.isdisjoint(range(start, position))
        if is_listed or _TAKEN_BACK.match(roles, position) or conditional[start] or asked[position - 1]:
            continue
        is_negated, is_wrong = "n" in span or rule == "none", rule in ("judged", "none") and span[-1] == "w"
        if is_negated and is_wrong:
            continue  # "B is not wrong" states nothing.
        if not is_negated and not is_wrong:
            stated |= about
            is_weak = "t" in span or rule == "matched"
            yield _Statement(start, about, adds="q" in span or rule == "added", is_weak=is_weak)
            continue
        # A verdict may be the reason for the answer: "The answer is B because B is wrong", "B is wrong, as asked". So
        # it counts against a letter that was stated before only if it is not a reason, or takes that back.
        sentence = max(roles.rfind(mark, 0, start) for mark in ".?\n") + 1
        is_reason = "b" in roles[sentence:start] or roles.startswith(",b", position)
        if rule != "judged" or retracting[start] or (about & stated and not is_reason):
            yield _Statement(start, about, states=False)
        if is_negated and (but := _BUT.match(roles, position)) is not None:
            yield _Statement(position, frozenset(filter(None, letters[slice(*but.span())])))
            position = but.end()


def _until(roles: str, begin: str, ends: str) -> list[bool]:
    """Return for each role whether one of a kind came before it in the same clause or sentence."""
    found, is_inside = [], False
    for role in roles:
        is_inside = role == begin or (is_inside and role not in ends)
        found.append(is_inside)
    return found


def _lines(roles: str, letters: Sequence[str]) -> tuple[list[_Statement], frozenset[int]]:
    """Return lines that are a label, or a label and text, and the positions of labels that are parts of lists."""
    bare: list[int] = []
    headed: list[int] = []
    for found in _LINE.finditer(roles):
        at = found.start("mark") - 1
        if not found["rest"]:
            bare.append(at)
        elif (found["mark"] or roles[at] in "WH") and not _ANOTHER_LABEL.search(found["rest"]):
            headed.append(at)
    # Labels that follow one another in the alphabet list the options.
    pairs = [*pairwise(bare), *pairwise(headed)]
    listed = frozenset(label for a, b in pairs if ord(letters[b]) == ord(letters[a]) + 1 for label in (a, b))
    statements = [
        _Statement(at, frozenset((letters[at],)), is_weak=is_weak)
        for labels, is_weak in ((bare, False), (headed, True))
        for at in labels
        if at not in listed
    ]
    return statements, listed


def _roles(text: str, num_choices: int) -> tuple[str, list[str]]:
    """Return the roles of the words and signs of a text, from the beginning of its first line on, in linear time.

    Args:
        text: Anything, with Markdown or LaTeX around its letters.
        num_choices: Number of options; a letter beyond them is a word like any other.

    Returns:
        One character for each word or sign, and the letter of each, upper case; empty for one that is not a letter.
    """
    roles: list[str] = []
    letters: list[str] = []
    text = "\n" + text.translate(_NARROW)
    last = chr(ord("A") + num_choices - 1)
    for found in _TOKEN.finditer(text):
        letter = found["letter"]
        if not letter:
            new = _word_roles(found)
            roles += new
            letters += [""] * len(new)
            continue
        role = _letter_role(found, text, roles[-1] if roles else "\n")
        is_option = role in "LWHl" and letter.upper() <= last
        if _CUE_MARK.search(found["open"]):
            roles.append("X")
            letters.append("")
        roles.append(role if is_option or role not in "LWHl" else "x")
        letters.append(letter.upper() if is_option else "")
    return "".join(roles), letters


def _word_roles(found: re.Match[str]) -> str:
    """Return the roles of a word or sign that is not a single letter; a contraction has several."""
    text = found[0]
    match found.lastgroup:
        case "line":
            return "\n"
        case "space" | "closing":
            return ""
        case "marks":
            return "X" if _CUE_MARK.search(text) else ""
        case "phrase":
            return _PHRASES[text.lower()]
        case "cjk":
            return _KINDS[text]
        case "sign":
            return _SIGNS.get(text, "e")
        case "word":
            word = text.lower().replace("’", "'")
            stem, mark, ending = word.rpartition("'")
            if word in ("i.e", "namely"):
                return "e"
            if not mark:
                return "mn" if word == "cannot" else _KINDS.get(word, "x")
            if ending == "t":
                return "cn" if stem in ("isn", "aren", "wasn", "weren") else "mn"
            follows = {"s": "c", "re": "c", "m": "c", "d": "m", "ll": "m"}.get(ending, "")
            return _KINDS.get(stem, "x") + follows
    return "x"


def _letter_role(found: re.Match[str], text: str, before: str) -> str:
    """Return the role of a single letter: of an option, an article, a pronoun, or a word like any other."""
    letter, opened, closed = found["letter"], found["open"], found["close"]
    if opened and before == "x" and text[found.start() - 1].isalnum():
        return "x"  # This is `f(A)` or `x_B`.
    if opened and closed:
        return "W"
    if closed[:1] in (")", "）") and (letter.isupper() or before in "\naoce"):
        return "H"
    if _NOT_AN_OPTION.match(text, found.end()):
        return "x"
    following = _AFTER_A.match(text, found.end())
    word = following[1].lower() if following else ""
    if letter in "Aa" and word and _KINDS.get(word, "x") not in "ctmnbkupijrs" and not _VERBS_AFTER_A.fullmatch(word):
        return "d"
    if letter in "Ii" and word not in ("", "is", "because", "since"):
        return "f"
    if letter == "a" and word:
        return "d"
    return "L" if letter.isupper() else "l"
