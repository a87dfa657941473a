"""Fields of agents' requests without effect, from the request to the driver's log and the metrics."""

import asyncio

import numpy as np
from scripted_client import END, ScriptedClient, session_of

from rl_algos.agents.dialects.completions import ChatCompletions
from rl_algos.agents.dialects.messages import Messages
from rl_algos.rollouts.driver.watches import IgnoredFieldsWatch
from rl_algos.rollouts.training.metrics import rollout_metrics
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt

USER = {"role": "user", "content": "Hi"}
PROMPT = Prompt("p0", (USER,), np.zeros(1, np.int32), "agent")


def rollout_of(*calls):
    async def main():
        session = session_of(ScriptedClient(lambda before, draw: f"Draw {draw}.{END}"))
        for call in calls:
            await session.answer(call)
        session.add_rewards({"reward": 1.0})
        return session.rollouts()[0]

    return asyncio.run(main())


def test_fields_without_effect_are_in_the_drivers_log_once_and_in_the_metrics(caplog):
    chat = ChatCompletions().read({"messages": [USER], "temperature": 0.0, "tool_choice": "required"})
    prefilled = Messages().read({"messages": [USER, {"role": "assistant", "content": "The"}], "max_tokens": 9})
    groups = [RolloutGroup.of(PROMPT, [rollout_of(chat), rollout_of(prefilled)])]
    watch = IgnoredFieldsWatch()
    for _ in range(3):
        watch.check(groups)
    [record] = caplog.records
    assert record.getMessage().startswith("agents set prefill, temperature, tool_choice, without effect")
    ignored = {name: value for name, value in rollout_metrics(groups).items() if name.startswith("rollout/ignored/")}
    assert ignored == {f"rollout/ignored/{name}": 1.0 for name in ("prefill", "temperature", "tool_choice")}


def test_agents_that_set_nothing_are_not_reported(caplog):
    groups = [RolloutGroup.of(PROMPT, [rollout_of(ChatCompletions().read({"messages": [USER]}))])]
    IgnoredFieldsWatch().check(groups)
    assert not caplog.records
    assert not [name for name in rollout_metrics(groups) if "ignored" in name]
