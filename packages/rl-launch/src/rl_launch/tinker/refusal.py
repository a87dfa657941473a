"""Requests that are not done, as the client reads them."""

from __future__ import annotations

import json
from typing import Literal


class RequestRefused(Exception):
    """A request that is not done.

    Args:
        message: For the user of the client.
        status: HTTP status, if it is refused when it arrives.
        category: `user` if another request would be done, `server` if it is our failure.
        retry_after_s: When the same request may be sent again; None for never.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        category: Literal["user", "server"] = "user",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.category, self.retry_after_s = status, category, retry_after_s

    @property
    def body(self) -> bytes:
        """The answer of the API, as JSON."""
        # Clients read `error` of a request's result, and the client's command line reads `detail`.
        return json.dumps({"error": str(self), "category": self.category, "detail": str(self)}).encode()


def not_found(what: str) -> RequestRefused:
    """Return the refusal of something that does not exist, or belongs to another tenant: both get the same answer."""
    return RequestRefused(f"{what} does not exist", status=404)
