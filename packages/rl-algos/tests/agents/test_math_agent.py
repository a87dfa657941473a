import asyncio
from dataclasses import replace
from fractions import Fraction

import pytest
from chat_tokenizers import tokenizer_of
from conftest import prompt
from scripted_client import check_trained

from rl_algos.agents.math_agent import compute
from rl_algos.rollouts.config import AgentConfig
from rl_core.rollouts.environment import StepResult


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3/4 + 2)**3", Fraction(1331, 64)),
        ("-7 // 2 % 3", Fraction(2)),
        ("2**-2", Fraction(1, 4)),
        ("0.1 + 0.2", Fraction(3, 10)),
        (" 10**30 + 1", Fraction(10**30 + 1)),
    ],
)
def test_arithmetic_is_exact(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "x", "9**9**9", "1 if 1 else 2", "2**0.5", "True", "10**999*10**999"]
)
def test_anything_else_than_numbers_of_a_modest_size_is_refused(expression):
    with pytest.raises(ValueError, match=r"not an expression|too large|must be an integer"):
        compute(expression)


def test_the_agent_computes_what_the_policy_asks_for_until_it_answers(make_worker, play):
    class Judge:
        async def step(self, conversation):
            return StepResult(reward=float(conversation.completion == "\\boxed{10}"))

        async def abandon(self, ids):
            pass

    def call(expression):
        return f'<tool_call>\n{{"name": "compute", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'

    turns = (f"{call('1+2+3')}\n{call('1/0')}", call("6+4"), "\\boxed{10}")
    worker = make_worker(
        AgentConfig(run="rl_algos.agents.math_agent:run", reward="environment"),
        lambda before, seed: turns[before.count("<|im_start|>assistant\n") - 1],
        function="rl_algos.agents.math_agent:run",
        environments={"agent": Judge()},
        chat=tokenizer_of("qwen3"),
        max_tokens=4000,
    )
    asked = replace(prompt("What is 1+2+3+4?"), info={"answer": 10})
    ([rollout], _) = asyncio.run(play(worker, asked=asked, max_new_tokens=400))
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.failure
    policy = worker._generator
    last = policy.tokenizer.decode(policy.requests[-1].token_ids.tolist())
    assert "<tool_response>\n6\n</tool_response>\n<tool_response>\nerror: Fraction(1, 0)\n</tool_response>" in last
    calls = [(each.token_ids, drawn) for each, drawn in zip(policy.requests, policy.completions, strict=True)]
    check_trained(rollout, calls)
