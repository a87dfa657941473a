"""Words and sentences as nltk's tokenizers for English find them, which IFEval counts.

Sentences follow the decisions of the Punkt model (Kiss and Strunk, 2006) by rules and short lists, without its
statistics on the case of words, which decide about a capitalised word after an abbreviation.
"""

from __future__ import annotations

import re

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


def num_sentences(text: str) -> int:
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
