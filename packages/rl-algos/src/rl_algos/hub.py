"""Availability of names on the Hugging Face hub, asked once before libraries ask again and again."""

from __future__ import annotations

import logging
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_log = logging.getLogger(__name__)

LONGEST_S = 3.0
"""Seconds for which the hub may be silent before it counts as out of reach."""

Kind = Literal["model", "dataset"]

_NOT_SHOWN = (401, 403, 404)
_CHECK = "Check the name; a private or gated one needs HF_TOKEN"


@dataclass(frozen=True)
class Answer:
    """The hub's answer about a name.

    Args:
        reason: Why there was no answer; empty if there was one.
        is_shown: True if the hub has it and shows it to this user.
    """

    reason: str = ""
    is_shown: bool = True


_silent: list[Answer] = []
"""The first question that was not answered."""


def problem(kind: Kind, name: str) -> str:
    """Why a model or dataset of the hub is unavailable, and the remedy, as text that follows the name; empty if it is
    available.

    If the hub is out of reach and a download lies in the cache, libraries are told to work offline: each of them would
    otherwise ask the hub again for minutes.
    """
    is_here = is_cached(kind, name)
    if is_offline():
        return "" if is_here else f"{_absent(kind)} and HF_HUB_OFFLINE is set. Unset it, or {_remedy(kind, name)}"
    answer = ask(kind, name)
    if not answer.reason:
        here = "not a local folder, and " if kind == "model" else ""
        return "" if is_here or answer.is_shown else f"{here}not a {kind} on {endpoint()} that is open to you. {_CHECK}"
    if not is_here:
        silent = f"and {endpoint()} cannot be reached ({answer.reason})"
        return f"{_absent(kind)} {silent}. Check the network, or {_remedy(kind, name)}"
    _go_offline(answer.reason)
    return ""


def endpoint() -> str:
    """Address of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def cache_folder() -> Path:
    """Folder of the hub's downloads."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def is_cached(kind: Kind, name: str) -> bool:
    """Return whether the cache has a complete or partial download of this name."""
    snapshots = cache_folder() / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(any(each.iterdir()) for each in snapshots.iterdir() if each.is_dir())


def downloaded(kind: Kind, name: str) -> Path | None:
    """The folder of the newest download of this name in the cache; None if there is none."""
    folder = cache_folder() / f"{kind}s--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def is_offline() -> bool:
    """Return whether the libraries of the hub are set to offline mode."""
    values = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
    return next((value for value in values if value), "").upper() in {"1", "ON", "YES", "TRUE"}


@cache
def ask(kind: Kind, name: str) -> Answer:
    """Ask the hub for a name, for at most `LONGEST_S`; a hub that did not answer once is not asked again."""
    if _silent:
        return _silent[0]
    found = [Answer(reason=f"no answer within {LONGEST_S:g} s")]
    # looking up the address has no time limit
    asking = threading.Thread(target=lambda: found.append(_answer(kind, name)), daemon=True)
    asking.start()
    asking.join(LONGEST_S)
    if found[-1].reason:
        _silent.append(found[-1])
    return found[-1]


def forget() -> None:
    """Forget every answer, so that the hub is asked again."""
    ask.cache_clear()
    _silent.clear()


def _answer(kind: Kind, name: str) -> Answer:
    # takes a while to import; local names do not need it
    from huggingface_hub import get_token

    request = urllib.request.Request(f"{endpoint()}/api/{kind}s/{name}", method="HEAD")
    if token := get_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=LONGEST_S):
            return Answer()
    except urllib.error.HTTPError as error:
        return Answer(is_shown=error.code not in _NOT_SHOWN)
    except urllib.error.URLError as error:
        # libraries of the hub may know certificates that Python does not
        return Answer(reason="" if isinstance(error.reason, ssl.SSLError) else str(error.reason))
    except (OSError, ValueError) as error:
        return Answer(reason=str(error) or type(error).__name__)


def _go_offline(reason: str) -> None:
    _log.warning("%s cannot be reached (%s): using the downloads in %s", endpoint(), reason, cache_folder())
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, constant in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if name in sys.modules:  # read the variable when it was imported
            setattr(sys.modules[name], constant, True)


def _absent(kind: Kind) -> str:
    here = "not a local folder, " if kind == "model" else ""
    return f"{here}not among the downloads in {cache_folder()},"


def _remedy(kind: Kind, name: str) -> str:
    option = "" if kind == "model" else " --repo-type dataset"
    return f"download it on a machine that has one (hf download {name}{option}) and copy it, or give a local path"
