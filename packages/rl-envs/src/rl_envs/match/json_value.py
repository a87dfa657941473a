"""The JSON in a response."""

from __future__ import annotations

from typing import Any

from rl_core.model_json import read_model_json
from rl_envs.fences import fenced_blocks


def json_in(response: str) -> Any:
    """Return the value of the last fenced block of JSON or without a language, or else of the whole response.

    Raises:
        MalformedJson: If it is not JSON within the bounds of `read_model_json`: NaN, a key twice in an object and deep
            nesting are not.
    """
    blocks = [body for language, body in fenced_blocks(response) if language in ("json", "")]
    return read_model_json((blocks[-1] if blocks else response).strip().removeprefix("\ufeff"))
