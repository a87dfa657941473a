"""The agents of the guide, each in an environment of its framework, trained on without a change to either.

An environment takes 1 to 5 seconds to build, and an agent 2 to 4 seconds to start.
"""

import asyncio
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chat_tokenizers import tokenizer_of
from conftest import prompt
from scripted_client import calls_of, check_trained

from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.config import AgentConfig
from rl_algos.rollouts.training.batch import build_batch
from rl_core.rollouts.group import RolloutGroup
from rl_core.testing.documents import documents_for
from rl_core.testing.exhaustive import partly_exhaustive

ROOT = Path(__file__).parents[4]
BLOCKS = {block.file: block.text for document in documents_for("rl-algos", ROOT) for block in document.blocks}


@dataclass(frozen=True)
class Framework:
    """A framework and a policy that uses its tools.

    Args:
        requirements: Distributions of its environment.
        turns: Texts of the policy, which add 1+2 and 3+4 at once, and then both results.
        seen: What the policy sees of the results of the first turn.
        num_segments: Number of rows of the rollout.
    """

    requirements: tuple[str, ...]
    turns: tuple[str, ...]
    seen: str
    num_segments: int


FRAMEWORKS = {
    "smol_agent.py": Framework(
        ("smolagents[openai]==1.26.0", "openai==3.57.0"),
        (
            "I add both pairs.\n<code>\nprint(add(1, 2), add(3, 4))\n</code>",
            "The last sum.\n<code>\nfinal_answer(add(3, 7))\n</code>",
        ),
        "Execution logs:\n3 7\n",
        num_segments=2,  # it lists the calls behind the turn that made them
    ),
    "sdk_agent.py": Framework(
        ("openai-agents==0.24.0", "openai==3.57.0"),
        (
            "<think>\nTwo sums.\n</think>\n\n" + calls_of('{"a": 1, "b": 2}', '{"a": 3, "b": 4}'),
            calls_of('{"a": 3, "b": 7}'),
            "10",
        ),
        "<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>",
        num_segments=1,
    ),
}


@pytest.fixture(scope="session")
def python_with(tmp_path_factory):
    """Builds the environment of some distributions, and returns its Python."""

    def build(*requirements):
        folder = tmp_path_factory.mktemp("framework")
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, folder], check=True)
        python = folder / "bin" / "python"
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *requirements], check=True)
        return str(python)

    return build


def test_every_agent_of_the_guide_is_run_in_its_framework():
    assert BLOCKS.keys() == FRAMEWORKS.keys()


@pytest.mark.parametrize("file", partly_exhaustive(FRAMEWORKS, always=["sdk_agent.py"]))
def test_an_agent_in_an_unmodified_framework_is_trained_on_token_by_token(
    make_worker, play, python_with, tmp_path, file
):
    framework = FRAMEWORKS[file]
    Path(tmp_path, file).write_text(BLOCKS[file])
    config = AgentConfig(command=[python_with(*framework.requirements), str(tmp_path / file)])

    def turn(before, seed):
        return framework.turns[before.count("<|im_start|>assistant\n") - 1]

    worker = make_worker(config, turn, chat=tokenizer_of("qwen3"), max_tokens=20_000)
    asked = replace(prompt("What is 1+2+3+4?"), info={"answer": 10})
    ([rollout], _) = asyncio.run(play(worker, asked=asked, max_new_tokens=400))
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.failure
    policy = worker._generator
    calls = [(each.token_ids, drawn) for each, drawn in zip(policy.requests, policy.completions, strict=True)]
    assert len(calls) == len(framework.turns)
    assert framework.seen in policy.tokenizer.decode(calls[1][0].tolist())
    check_trained(rollout, calls, framework.num_segments)
    batch = build_batch([RolloutGroup.of(asked, [rollout])], GRPOConfig(agent=config))
    assert int(batch.ragged("loss_mask").values.sum()) == sum(len(drawn.token_ids) for _, drawn in calls)
