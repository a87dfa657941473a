"""A small coding agent: the policy writes shell commands, sees their output, and ends when it is done.

It runs in a sandbox, as a file, in the folder of the working copy: it imports nothing but the standard library.
`RL_AGENT_TURNS` is the maximum number of its turns, `RL_AGENT_COMMAND_S` the timeout of a command in seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from typing import Any

INSTRUCTIONS = """You solve a task in the repository in the current folder. In each turn, think briefly and then write \
one shell command in a block:

```bash
ls
```

It is run with bash in that folder, and you see its output. Each command starts afresh in that folder. When the task \
is solved, write DONE in a turn without a command.

The task:
"""
DONE = "DONE"
SHOWN = 4000
"""Maximum number of characters of a command's output that the policy sees; the middle is left out."""

_BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


def main() -> None:
    """Let the policy work until it is done, or at a limit."""
    with open(os.environ["RL_PROMPT_FILE"], encoding="utf-8") as file:
        messages = json.load(file)["messages"]
    messages[-1] = {**messages[-1], "content": INSTRUCTIONS + messages[-1]["content"]}
    for _ in range(int(os.environ.get("RL_AGENT_TURNS", "30"))):
        try:
            said = ask(messages)
        except urllib.error.HTTPError as error:
            # The rollout has no room for another turn: the working copy is scored as it is.
            reason = error.read().decode(errors="replace")[:500]
            print(f"the policy ended the conversation: {reason}")  # noqa: T201  # to the agent's log
            return
        commands = _BLOCK.findall(said["content"] or "")
        if not commands and DONE in (said["content"] or ""):
            return
        seen = run(commands[0]) if commands else "Write one command in a block that begins with ```bash, or DONE."
        messages += [said, {"role": "user", "content": seen}]


def run(command: str) -> str:
    """Return the output of a command and its exit code, as the policy sees them."""
    timeout_s = float(os.environ.get("RL_AGENT_COMMAND_S", "120"))
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"The command took longer than {timeout_s:g} s and was ended."
    output = done.stdout.decode(errors="replace")
    if len(output) > SHOWN:
        output = f"{output[: SHOWN // 2]}\n[{len(output) - SHOWN} characters left out]\n{output[-SHOWN // 2 :]}"
    return f"{output}\n[exit code {done.returncode}]"


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the policy's answer to a conversation, as a message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


if __name__ == "__main__":
    main()
