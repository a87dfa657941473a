"""Availability of names on the Hugging Face hub, asked once before libraries ask again and again."""

from __future__ import annotations

import logging
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

_log = logging.getLogger(__name__)

MAX_SILENCE_S = 3.0
"""Maximum number of seconds without an answer before the hub counts as out of reach."""

Kind = Literal["model", "dataset"]

_NOT_SHOWN = (401, 403, 404)
_CHECK = "Check the name; a private or gated one needs HF_TOKEN"


class HubAnswer(NamedTuple):
    """The hub's answer about a name.

    Attributes:
        reason: Why there was no answer; empty if there was one.
        is_shown: True if the hub has it and shows it to this user.
    """

    reason: str = ""
    is_shown: bool = True


_silent: list[HubAnswer] = []
"""The first question that was not answered."""


def problem(kind: Kind, name: str) -> str:
    """Return why a model or dataset of the hub is unavailable, and the remedy, as text that follows the name; empty if
    it is available.

    If the hub is out of reach and a download is in the cache, libraries are set to work offline: each of them would
    otherwise ask the hub again for minutes.
    """
    is_here, local = is_cached(kind, name), "not a local folder, " if kind == "model" else ""
    absent = f"{local}not among the downloads in {cache_folder()},"
    option = "" if kind == "model" else " --repo-type dataset"
    remedy = f"download it on a machine that has one (hf download {name}{option}) and copy it, or give a local path"
    if is_offline():
        return "" if is_here else f"{absent} and HF_HUB_OFFLINE is set. Unset it, or {remedy}"
    answer = ask(kind, name)
    if not answer.reason:
        known = f"{local}and " if local else ""
        return (
            "" if is_here or answer.is_shown else f"{known}not a {kind} on {endpoint()} that is open to you. {_CHECK}"
        )
    if not is_here:
        silent = f"and {endpoint()} cannot be reached ({answer.reason})"
        return f"{absent} {silent}. Check the network, or {remedy}"
    _log.warning("%s cannot be reached (%s): using the downloads in %s", endpoint(), answer.reason, cache_folder())
    os.environ["HF_HUB_OFFLINE"] = "1"
    # These modules read the variable when they were imported.
    constant = "HF_HUB_OFFLINE"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            setattr(sys.modules[module], constant, True)
    return ""


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def cache_folder() -> Path:
    """Return the folder of the hub's downloads."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def is_cached(kind: Kind, name: str) -> bool:
    """Return whether the cache has a complete or partial download of this name."""
    snapshots = cache_folder() / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(any(each.iterdir()) for each in snapshots.iterdir() if each.is_dir())


def downloaded(kind: Kind, name: str) -> Path | None:
    """Return the folder of the newest download of this name in the cache; None if there is none."""
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
def ask(kind: Kind, name: str) -> HubAnswer:
    """Ask the hub for a name, for at most `MAX_SILENCE_S`; a hub that did not answer once is not asked again."""
    if _silent:
        return _silent[0]
    found = [HubAnswer(reason=f"no answer within {MAX_SILENCE_S:g} s")]
    # The lookup of the address has no time limit.
    asking = threading.Thread(target=lambda: found.append(_answer(kind, name)), daemon=True)
    asking.start()
    asking.join(MAX_SILENCE_S)
    if found[-1].reason:
        _silent.append(found[-1])
    return found[-1]


def forget() -> None:
    """Forget every answer, so that the hub is asked again."""
    ask.cache_clear()
    _silent.clear()


def _answer(kind: Kind, name: str) -> HubAnswer:
    # This import takes a while; local names do not need it.
    from huggingface_hub import get_token

    request = urllib.request.Request(f"{endpoint()}/api/{kind}s/{name}", method="HEAD")
    if token := get_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=MAX_SILENCE_S):
            return HubAnswer()
    except urllib.error.HTTPError as error:
        return HubAnswer(is_shown=error.code not in _NOT_SHOWN)
    except urllib.error.URLError as error:
        # Libraries of the hub may know certificates that Python does not.
        return HubAnswer(reason="" if isinstance(error.reason, ssl.SSLError) else str(error.reason))
    except (OSError, ValueError) as error:
        return HubAnswer(reason=str(error) or type(error).__name__)
