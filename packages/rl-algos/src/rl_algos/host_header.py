"""The `Host` header of a request, which decides whether a page of another name may have sent it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


def host_name(sent: Sequence[str]) -> str:
    """Return the name or address that a request was sent to, in lower case and without port and brackets; empty if its
    `Host` header is missing, repeated or malformed.

    Args:
        sent: All values of the header.
    """
    found = _HOST.fullmatch(sent[0]) if len(sent) == 1 else None
    return "" if found is None else found[1].strip("[]").lower()
