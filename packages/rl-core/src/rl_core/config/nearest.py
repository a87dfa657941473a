"""The keys that a mistyped, misplaced or half-remembered one most likely means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_GOOD = 0.7
_TIE = 0.04


def nearest(key: str, candidates: Iterable[str], *, most: int = 3) -> list[str]:
    """Candidates close to a dotted key, best first: by its last name foremost, then by the whole path.

    So a typo (`grpo.num_promts_per_step`), a wrong section (`policy.num_prompts_per_step`), a missing prefix
    (`num_prompts_per_step`) and a name cut short or with its words in another order (`policy.max_sequence_length`) are
    all found.
    Candidates that are as good as the best come along, `most` in all.
    """
    scored = sorted(((_score(key, candidate), candidate) for candidate in set(candidates)), key=lambda s: (-s[0], s[1]))
    if not scored or scored[0][0] < _GOOD:
        return []
    best = scored[0][0]
    return [candidate for score, candidate in scored[:most] if score >= max(_GOOD, best - _TIE)]


def did_you_mean(key: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no candidate is close."""
    near = nearest(key, candidates)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _score(key: str, candidate: str) -> float:
    name, other = key.rpartition(".")[2], candidate.rpartition(".")[2]
    last = max(_ratio(name, other), _words(name, other))
    if last < 0.5:
        return 0.0
    return 0.8 * last + 0.2 * _ratio(key, candidate)


def _ratio(a: str, b: str) -> float:
    matcher = SequenceMatcher(None, a.lower(), b.lower(), autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() > 0.5 else 0.0


def _words(name: str, other: str) -> float:
    """Likeness of names by their words: the same words in any order 0.95, some of them left out or put in less."""
    mine, theirs = (set(re.split(r"[_\W]+", text.lower())) - {""} for text in (name, other))
    shared = len(mine & theirs)
    if not shared or shared < min(len(mine), len(theirs)):
        return 0.0
    return 0.75 + 0.2 * shared / max(len(mine), len(theirs))
