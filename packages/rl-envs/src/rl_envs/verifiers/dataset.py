"""Rows of a taskset of verifiers, read in a process of their own, because the taskset is other people's code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, DataError
from rl_core.install_command import install_command
from rl_envs.verifiers.imports import importable_id
from rl_envs.verifiers.plugin import VerifiersSettings

MAX_TASK_BYTES = 2**20
"""Maximum number of bytes of a task as JSON: it travels with each rollout of its row."""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` and `environment`; the info has the taskset and the task's data.

    Raises:
        ConfigError: If verifiers is not installed, or the taskset needs a `size`.
        DataError: If the taskset cannot be loaded, or a task is too large.
    """
    config = VerifiersSettings.model_validate(dict(settings))
    if find_spec("verifiers") is None:
        raise ConfigError(f"verifiers is not installed: {install_command('rl-envs[verifiers]')}")
    code = f"import sys; sys.path[:] = {sys.path!r}; from rl_envs.verifiers.dataset import main; main()"
    done = subprocess.run([sys.executable, "-c", code], input=config.model_dump_json(), capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"its process ended with status {done.returncode}"]
        raise DataError(f"the taskset {config.id!r} of verifiers cannot be loaded: {last[0][:1000]}")
    return list(map(json.loads, done.stdout.splitlines()))


def main() -> None:
    """Read settings from standard input, and write rows to standard output as JSON lines."""
    config, rows = VerifiersSettings.model_validate_json(sys.stdin.read()), sys.stdout
    sys.stdout = sys.stderr  # Output of the taskset is not a row.
    for row in _rows(config):
        rows.write(row + "\n")


def _rows(config: VerifiersSettings) -> Iterator[str]:
    from verifiers.v1 import load_taskset, taskset_config_type

    id = importable_id(config.id)
    taskset = load_taskset(taskset_config_type(id).model_validate({**config.config, "id": id}))
    if config.size is None and not taskset.bounded:
        raise ValueError("it has no end; set `size` to a number of rows")
    written = str(Path(config.id).expanduser().absolute()) if config.id.endswith(".py") else config.id
    end = None if config.size is None else config.start + config.size
    for task in islice(taskset, config.start, end):
        data = task.data.model_dump(mode="json", exclude_none=True)
        info = {"taskset": {**config.config, "id": written}, "task": data}
        row = json.dumps({"messages": _messages(data), "info": info, "environment": "verifiers"}, allow_nan=False)
        if len(row) > MAX_TASK_BYTES:
            raise ValueError(f"task {data.get('idx')} has {len(row)} bytes; the maximum is {MAX_TASK_BYTES}")
        yield row


def _messages(data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what a task begins with, for those who read the rows; the agent itself reads the task."""
    system, prompt = data.get("system_prompt"), data.get("prompt")
    said = [{"role": "system", "content": system}] if system else []
    if prompt is None:
        prompt = data.get("description") or data.get("name") or f"task {data.get('idx')}"
    if isinstance(prompt, str):
        return [*said, {"role": "user", "content": prompt}]
    for message in prompt:
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if any(part["type"] != "text" for part in parts):
            raise ValueError(f"task {data.get('idx')} has images, and rows of verifiers are text only")
        said.append({"role": message["role"], "content": "".join(part["text"] for part in parts)})
    return said
