"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algos.agents.calls import CallRefused

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(refused: CallRefused) -> Mapping[str, Any]:
    """Return the JSON body of an error."""
    kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param or None, "code": refused.code}}
