"""Tokens of a response to a multiple choice, one character for the role of each word, for a grammar to read."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Kinds of a letter that may be an option: `L` bare and capital, `l` bare, `W` enclosed as in `(b)`, `H` before a
# bracket as in `B)`. Other kinds: `X` a box or tag, `d` an article, `e` a colon or the like, `x` anything else.
_VOCABULARY = {
    # a: what the question asks for, which the letter is said to be
    "a": "answer answers solution conclusion ans antwort réponse respuesta risposta resposta ответ "
    "答案 答え 正解 正答 정답",
    # o: a noun before a letter
    "o": "option choice letter alternative statement item selection response opción opção opzione вариант 选项",
    # O: the same nouns for all letters, which introduce a list
    "O": "options choices alternatives statements letters candidates possibilities format",
    "p": "it this that which one",
    "c": "is are was be being equals ist lautet est es è é это 是 为 為 は",
    "m": "must should would will shall has have to ought",
    "t": "could might may can perhaps maybe possibly seems seem appears looks presumably either",
    "N": "neither none",
    "n": "not no never nor nobody except excluding exclude excludes eliminate eliminates eliminated "
    "eliminating reject rejects rejecting discard without unlike avoid non than almost "
    "hardly barely nearly partially partly 不",
    "h": "think believe say guess feel suspect reckon conclude deduce infer assert",
    "v": "choose chose choosing select selected selecting pick picked picking go going went opt opting settle settled "
    "settling vote mark leaves leaving left 选 選 选择",
    "r": "with on for upon to us me only",
    "y": "makes making make confirms confirming",
    "z": "matches match corresponds correspond corresponding matching aligns fits points",
    "g": "correct right best final accurate winner richtig richtige correcta correcte correta "
    "bonne правильный 正确 最终",
    "w": "wrong incorrect false invalid untrue inaccurate eliminated excluded impossible distractor distractors "
    "inconsistent implausible out falsch incorrecta 错误",
    "j": "so thus hence therefore ergo consequently accordingly finally then overall donc luego 故 所以 因此 应 應 该",
    "b": "because since as due given denn weil porque",
    "f": "the an my our your i chosen most likely probably clearly definitely certainly obviously surely indeed simply "
    "just actually now here of very more single first second third fourth next following we am sure confident "
    "die der la le el il o lo c",
    "k": "and or und oder et ou y 和 或",
    "u": "but rather",
    "i": "if unless whether suppose supposing assume assuming imagine were initially thought seemed tempted tempting "
    "glance trap pretend doubt doubts unlikely 如果",
    "s": "wait hmm oops sorry mistake however correction",
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
"""What follows a letter that is a variable, a degree of a scale, or a part of a compound or an abbreviation."""
_NARROW = {0xFF21 + index: chr(ord("A") + index) for index in range(26)}
"""Full-width capital letters."""
_AFTER_A = re.compile(r"[ \t]++([A-Za-z]++)")
_VERBS_AFTER_A = re.compile("matches|fits|describes|says|states|shows|gives|satisfies|works|has|does")


@dataclass(frozen=True)
class Tokens:
    """A response as a grammar reads it.

    Args:
        kinds: The role of each word or sign, one character each.
        letters: The letter of each, upper case; empty for one that is not a letter.
    """

    kinds: str
    letters: tuple[str, ...]


def read_tokens(text: str, num_choices: int = 26) -> Tokens:
    """Return the tokens of a response, from the beginning of its first line on, in linear time.

    Args:
        text: Anything, with Markdown or LaTeX around its letters.
        num_choices: Number of options; a letter beyond them is a word like any other.
    """
    kinds: list[str] = []
    letters: list[str] = []
    text = "\n" + text.translate(_NARROW)
    last = chr(ord("A") + num_choices - 1)
    for found in _TOKEN.finditer(text):
        if found["letter"]:
            role = _letter_role(found, text, kinds[-1] if kinds else "\n")
            cue = "X" if _CUE_MARK.search(found["open"]) else ""
            is_option = role in "LWHl" and found["letter"].upper() <= last
            kinds += [*cue, role if is_option or role not in "LWHl" else "x"]
            letters += [*([""] * len(cue)), found["letter"].upper() if is_option else ""]
            continue
        roles = _roles(found)
        kinds += roles
        letters += [""] * len(roles)
    return Tokens("".join(kinds), tuple(letters))


def _roles(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "line":
            return "\n"
        case "space" | "closing":
            return ""
        case "marks":
            return "X" if _CUE_MARK.search(found[0]) else ""
        case "word":
            word = found[0].lower().replace("’", "'")
            if word in ("i.e", "namely"):
                return "e"
            stem, mark, ending = word.rpartition("'")
            if not mark:
                return "mn" if word == "cannot" else _KINDS.get(word, "x")
            if ending == "t":
                return "cn" if stem in ("isn", "aren", "wasn", "weren") else "mn"
            follows = {"s": "c", "re": "c", "m": "c", "d": "m", "ll": "m"}.get(ending, "")
            return _KINDS.get(stem, "x") + follows
        case "phrase":
            return _PHRASES[found[0].lower()]
        case "cjk":
            return _KINDS[found[0]]
        case "sign":
            return _SIGNS.get(found[0], "e")
    return "x"


def _letter_role(found: re.Match[str], text: str, before: str) -> str:
    """The kind of a single letter: of an option, an article, a pronoun, or a word like any other."""
    letter, opened, closed = found["letter"], found["open"], found["close"]
    if opened and before == "x" and text[found.start() - 1].isalnum():
        return "x"  # f(A), x_B
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
