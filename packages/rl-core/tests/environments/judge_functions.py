"""Reward functions that ask judges, for the tests of this folder; imported in the environments' processes."""

from __future__ import annotations

import asyncio

from rl_core.environments import messages
from rl_core.environments.judge_link import AskedJudge
from rl_core.environments.messages import LENGTH, Ask, write_value
from rl_core.rollouts.judging import JudgeFailed, Question

NUMBER = {"type": "number"}


async def score(response, critic):
    return await critic.ask(response, NUMBER)


async def scored(response, critic):
    return await critic.score([{"role": "assistant", "content": response}])


async def of_both(response, critic, strict):
    verdicts = await asyncio.gather(
        *(each.ask(f"{response}{index}", NUMBER) for each in (critic, strict) for index in "01")
    )
    return {f"part{index}": verdict for index, verdict in enumerate(verdicts)}


async def listed(responses, critic):
    return await asyncio.gather(*(critic.ask(each, NUMBER) for each in responses))


async def lenient(response, critic):
    try:
        return await critic.ask(response, NUMBER)
    except JudgeFailed as error:
        return {"reward": -1.0, "length": len(str(error))}


async def impatient(response, critic):
    try:
        return await asyncio.wait_for(critic.ask(response, NUMBER), 0.05)
    except TimeoutError:
        return 0.25


class Game:
    """Asks in both of its turns."""

    def __init__(self):
        self.turns = 0

    async def step(self, response, critic):
        verdict = await critic.ask(response, NUMBER)
        self.turns += 1
        return (f"{verdict}", verdict) if self.turns < 2 else verdict


def sync(response, critic):
    return 1.0


async def hostile(response, critic):
    """Do what the response says, past the functions that a reward should use."""
    connection = critic._link._connection
    link = critic._link

    def send(data):
        connection.sendall(LENGTH.pack(len(data)) + data)

    question = Question(({"role": "user", "content": "say 1"},), NUMBER)
    match response.split():
        case ["flood"]:
            for number in range(10_000):
                send(messages.write_ask(Ask(link._call, 1000 + number, "critic", question)))
        case ["deaf"]:
            # Nobody reads the answers.
            for number in range(200):
                send(
                    messages.write_ask(
                        Ask(link._call, 1000 + number, "critic", Question(({"role": "user", "content": "long"},)))
                    )
                )
            await asyncio.sleep(60)
        case ["late"]:
            asyncio.get_running_loop().call_soon(send, messages.write_ask(Ask(link._call - 1, 5, "critic", question)))
            await asyncio.sleep(0.01)
        case ["garbage"]:
            send(b"\xc1" * 50)
        case ["roles"]:
            send(write_value({"ask": [link._call, 1, "critic", [{"role": "root", "content": "x"}], None]}))
        case ["form"]:
            send(write_value({"ask": [link._call, 1, "critic", [{"role": "user", "content": "x"}], {"a": b"x"}]}))
        case ["unknown"]:
            await AskedJudge("other", link).ask("?")
        case ["object"]:
            await critic.ask("?", {"form": object()})
        case ["long"]:
            await critic.ask("x" * 2**21)
    return 1.0
