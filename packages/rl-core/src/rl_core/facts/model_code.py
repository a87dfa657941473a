"""Code that comes with a model's files: its digest, which a config names to trust it, without running it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_CLASS, MODEL_CLASS, CLASSIFIER_CLASS = "AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"
"""Entries of a config's `auto_map` that are read."""


def code_files(folder: Path) -> list[str]:
    """Return the paths of the Python files in a model's folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


def code_digest(folder: Path) -> str:
    """Return `sha256:` and the SHA-256 of the names and contents of the Python files in a model's folder."""
    parts = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in code_files(folder)}
    return f"sha256:{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}"


def code_problem(folder: Path, fields: Mapping[str, Any], trusted: str) -> str:
    """Return why the code in a folder is not run; empty if it is the trusted one and can be.

    Args:
        folder: Folder of the model.
        fields: Fields of its config.
        trusted: Digest of the code that a config trusts.
    """
    classes = fields.get("auto_map") or {}
    if lacking := [name for name in (CONFIG_CLASS, MODEL_CLASS) if name not in classes]:
        return f"its config.json names no {' and no '.join(lacking)} in auto_map"
    if elsewhere := next((str(name) for name in classes.values() if "--" in str(name)), ""):
        return f"its code ({elsewhere}) is in another repository, which the digest does not cover"
    found = code_digest(folder)
    if trusted == found:
        return ""
    return f"the digest of its code ({', '.join(code_files(folder)) or 'no Python files'}) is {found}"
