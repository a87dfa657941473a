"""Checks of the config that need vLLM, run in the worker's environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def problems(section: Mapping[str, Any]) -> list[str]:
    """Engine arguments that this vLLM does not have."""
    given = section["generation"]["vllm_cfg"]["vllm_kwargs"]
    if not given:
        return []
    from vllm import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs)]
    found = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            found.append(f"generation.vllm_cfg.vllm_kwargs.{name}: is not an argument of vLLM's engine{hint}")
    return found
