"""Tasks of NeMo Gym as rows, and what a policy did as an answer of the Responses API, which its servers grade."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_core.rollouts.environment import Conversation
from rl_envs.served.plugin import NeMoGymConfig

PARAMETERS = "responses_create_params"
"""Field of a task with the prompt and the tools."""
TASK = "task"
"""Field of a row with the whole task."""


def tasks_in(path: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a JSON Lines file.

    Raises:
        DataError: If the file or a line cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    task = json.loads(line)
                except (ValueError, RecursionError):
                    task = None
                if not isinstance(task, dict) or not isinstance(task.get(PARAMETERS), dict):
                    raise DataError(f"{path}:{number}: a task of NeMo Gym is an object with `{PARAMETERS}`")
                yield task
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def check_row(info: Mapping[str, Any], config: NeMoGymConfig) -> None:
    """Raise a `ValueError` for a row that is no task, or whose tools the policy cannot call."""
    if not isinstance(info.get(TASK), Mapping) or PARAMETERS not in info[TASK]:
        raise ValueError("the row has no `task`; rows of nemo_gym come from the dataset nemo_gym")
    if config.tools is None and tools_in(iter([info[TASK]])):
        raise ValueError("the task has tools; set env.nemo_gym.tools to the file of the tasks")


def messages_of(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt of a task as messages.

    Raises:
        ValueError: If it has more than text and calls.
    """
    parameters = task[PARAMETERS]
    given = parameters.get("input")
    messages: list[dict[str, Any]] = []
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given if isinstance(given, list) else ():
        match item:
            case {"role": str(role), "content": content}:
                messages.append({"role": "system" if role == "developer" else role, "content": _text(content)})
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                call = {"id": item.get("call_id", ""), "type": "function"}
                call["function"] = {"name": name, "arguments": arguments}
                if messages and messages[-1].get("tool_calls"):
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case {"type": "function_call_output", "output": output}:
                messages.append({"role": "tool", "content": _text(output), "tool_call_id": item.get("call_id", "")})
            case _:
                raise ValueError(f"the prompt has {repr(item)[:100]}; only messages, calls and their results are read")
    if not messages:
        raise ValueError(f"`{PARAMETERS}.input` is neither a string nor a list of messages")
    return messages


def _text(content: Any) -> str:
    """Return the text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if wrong := [part for part in parts if not (isinstance(part, dict) and isinstance(part.get("text"), str))]:
        raise ValueError(f"the prompt has {repr(wrong[0])[:100]}; only text is read")
    return "".join(part["text"] for part in parts)


def tools_in(tasks: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return schemas of the tools of all tasks, the first of each name."""
    tools: dict[str, Mapping[str, Any]] = {}
    for task in tasks:
        for tool in task[PARAMETERS].get("tools") or ():
            name = tool.get("name") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if isinstance(name, str) and name not in tools:
                function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
                tools[name] = {"type": "function", "function": function}
    return list(tools.values())


def items_of(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the newest turn of a conversation, without its thoughts, as items of the Responses API."""
    turn = conversation.turn
    message = conversation.messages[-1]
    # The text of a turn with calls has their marks; its message has not.
    text = str(message.get("content") or "") if conversation.tool_calls else conversation.final_text
    items: list[dict[str, Any]] = []
    if text or not conversation.tool_calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append(
            {"type": "message", "id": f"msg_{turn}", "role": "assistant", "status": "completed", "content": content}
        )
    for index, call in enumerate(conversation.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{turn}_{index}",
                "call_id": call_id(turn, index),
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments)),
                "status": "completed",
            }
        )
    return items


def call_id(turn: int, index: int) -> str:
    """Return the id of a call, which no other one of the conversation has."""
    return f"call_{turn}_{index}"


def response_of(
    conversation: Conversation, task: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return items as an answer of the Responses API to a task."""
    parameters = task[PARAMETERS]
    response = {
        "id": f"resp_{conversation.id}",
        "object": "response",
        "created_at": 0.0,
        "model": "policy",
        "output": list(items),
        "parallel_tool_calls": True,
        "tool_choice": parameters.get("tool_choice") or "auto",
        "tools": parameters.get("tools") or [],
    }
    if conversation.truncated:
        response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return response
