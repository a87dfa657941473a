"""An agent that asks for one number and writes it into a file, for the recipe `grpo-code-agent-tiny`.

It runs in a sandbox, as a file: it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any


def main() -> None:
    """Ask the policy the question of the prompt, and write a number that it answers to `answer.py`."""
    with open(os.environ["RL_PROMPT_FILE"], encoding="utf-8") as file:
        prompt = json.load(file)
    said = ask(prompt["messages"])["content"].strip()
    if said.isascii() and said.isdecimal():
        with open("answer.py", "w", encoding="utf-8") as file:
            file.write(f"ANSWER = {int(said)}\n")


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
