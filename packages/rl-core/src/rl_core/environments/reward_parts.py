"""Rewards that go with others in `env.<name>.rewards`, such as `rl_core:thinking_format`."""

from __future__ import annotations

import unicodedata

from rl_core.rollouts.thoughts import THOUGHTS, only_thoughts


def thinking_format(response: str, opened_thoughts: str = "") -> float:
    """1 if the response is one `<think>...</think>` and an answer after it, else 0; the prompt may have opened it."""
    found = only_thoughts(response, opened_thoughts)
    begins = (opened_thoughts + response).lstrip().startswith(tuple(THOUGHTS))
    return float(found is not None and begins and bool(found[0]) and bool(found[1].strip()))


def length_penalty(response: str, max_characters: int = 4000) -> float:
    """0 up to so many characters, falling linearly to -1 at twice as many; a row may say how many are allowed."""
    over = len(response) - max_characters
    return -min(max(over / max_characters, 0.0), 1.0)


def language_consistency(response: str, prompt: str) -> float:
    """Return the fraction of the response's letters in scripts that the prompt also uses; 1 without letters.

    DeepSeek-R1 rewards the share of words in the target language (arXiv:2501.12948); scripts tell, say, Chinese from
    English, and not English from French.
    """
    allowed = {_script(character) for character in prompt if character.isalpha()}
    letters = [character for character in response if character.isalpha()]
    if not letters or not allowed:
        return 1.0
    return sum(_script(character) in allowed for character in letters) / len(letters)


def _script(letter: str) -> str:
    """The script of a letter, as the first word of its Unicode name says it."""
    return unicodedata.name(letter, "UNKNOWN").partition(" ")[0].removesuffix("-")
