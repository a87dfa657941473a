"""The program in a response."""

from __future__ import annotations

from rl_envs.fences import fenced_blocks

_PYTHON = ("python", "python3", "py", "py3")


def program_in(response: str) -> str | None:
    """Return the last fenced block of Python, or else the last without a language; None if there is none."""
    blocks = list(fenced_blocks(response))
    named = [body for language, body in blocks if language in _PYTHON]
    unnamed = [body for language, body in blocks if not language]
    chosen = named or unnamed
    return chosen[-1] if chosen and chosen[-1].strip() else None
