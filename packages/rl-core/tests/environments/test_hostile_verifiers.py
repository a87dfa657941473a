"""Two hundred hostile verdicts in one step cost their own rollouts, and the step ends."""

from __future__ import annotations

import asyncio

from pools import failures, pool, turn

from rl_core.rollouts.environment import EnvironmentFailure

DEADLINE_S = 5.0

# what a turn does, how often, and a word of its report
HOSTILE = [
    ("raise bad", 76, "ValueError: bad"),
    ("nan", 60, "nan"),
    ("foreign", 48, "oops"),
    # each of these costs the start of a process
    ("exit", 4, "exit code 7"),
    ("kill", 4, "SIGKILL"),
    ("shout flooded", 3, "exit code 7"),
    ("need 4096", 2, "memory"),
    ("hang", 3, "deadline of 5 s"),
]


def test_hostile_verdicts_cost_their_own_rollouts_and_the_step_ends() -> None:
    words = [(word, says) for word, count, says in HOSTILE for _ in range(count)]
    assert len(words) == 200
    # a healthy turn behind each fourth one, and hostile ones of all kinds side by side
    mixed = [words[index * 67 % 200] for index in range(200)]
    turns: list[tuple[str, str]] = []
    for index, each in enumerate(mixed):
        turns += [each, ("say abc", "")] if index % 4 == 0 else [each]

    async def run() -> None:
        async with pool(workers=4, deadline_s=DEADLINE_S, memory_limit_gib=1.0, name="judge") as envs:
            await envs.start()
            # the hanging ones share the workers; the rest is for starts of processes on a busy machine
            async with asyncio.timeout(250):
                outcomes = await envs.step([turn(index, word) for index, (word, _) in enumerate(turns)])
            hostile = [index for index, (_, says) in enumerate(turns) if says]
            assert failures(outcomes) == hostile
            for (_, says), outcome in zip(turns, outcomes, strict=True):
                if isinstance(outcome, EnvironmentFailure):
                    assert says in outcome.reason
                    assert "judge" in outcome.reason
                else:
                    assert outcome.reward == 3.0
            assert failures(await envs.step([turn(f"next {index}", "say abc") for index in range(8)])) == []

    asyncio.run(run())
