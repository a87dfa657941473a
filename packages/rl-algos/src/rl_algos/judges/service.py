"""The service of a run that asks judges: limits, budget, cache and second tries are below it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_algos.judges.config import EndpointJudgeConfig, GeneratorJudgeConfig
from rl_algos.judges.rubrics import Rubric
from rl_core.rollouts.judging import JudgedReward, JudgedRollout, JudgeVerdict, Question


@dataclass(frozen=True)
class EngineAnswer:
    """The answer of an engine of the run to a question.

    Args:
        text: Text that was sampled, without thoughts.
        num_tokens: Number of tokens of question and answer.
        failure: Reason in one line that there is no answer; empty if there is one.
    """

    text: str = ""
    num_tokens: int = 0
    failure: str = ""


AskEngine = Callable[[str, Sequence[Question]], Awaitable[Sequence[EngineAnswer]]]
"""Asks the engines of a judge, by its name, questions; returns an answer to each, in order."""


def fixed_version(judge: str) -> str:
    """Return the version of a judge whose model never changes."""
    return ""


class JudgeService:
    """Asks the judges of a run that are language models. All methods are called on one event loop.

    Nothing depends on the order in which questions are asked, or on what is already in the cache.

    Args:
        judges: Judges by name: endpoints, and generators in engines of the run.
        cache_folder: Folder of verdicts, which several runs may share; None to keep none on disk.
        spent_file: File of the run in which spent tokens are counted, so that a budget holds over a kill and a resume;
            None to count in memory.
        ask_engine: Asks the engines of generators; needed if there are any.
        version: Returns the version of a generator's weights, such as the digest of the policy's; verdicts in the cache
            belong to a version. None if its verdicts must not be cached at present.
    """

    def __init__(
        self,
        judges: Mapping[str, EndpointJudgeConfig | GeneratorJudgeConfig],
        cache_folder: Path | None = None,
        spent_file: Path | None = None,
        ask_engine: AskEngine | None = None,
        version: Callable[[str], str | None] = fixed_version,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Open what needs an event loop; `AsyncWorkerHost` awaits it."""
        raise NotImplementedError

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        """Return the verdicts on questions, in order. A question without an answer that can be read is asked once more,
        with the next draw; then its verdict has a `failure`.

        Raises:
            JudgeBudgetSpent: If the judge has no tokens left for a question.
        """
        raise NotImplementedError

    async def judge(
        self, rewards: Mapping[str, Rubric], group: Sequence[JudgedRollout | None]
    ) -> list[dict[str, JudgedReward]]:
        """Return the rewards of the rollouts of one prompt, by the name of the reward.

        Args:
            rewards: Rewards by judges of this service, by reported name; `rl_algos.judges.config.judged_rewards` makes
                them on the driver.
            group: Rollouts of one prompt; None for one that failed, which has no rewards.

        Raises:
            JudgeBudgetSpent: If a judge has no tokens left.
        """
        raise NotImplementedError

    def usage(self) -> dict[str, float]:
        """Return the metrics `judge/<name>/...` since the last call: `requests`, `tokens`, `cached`, `unparsed`,
        `failed` (numbers) and `latency` (mean seconds of a request)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close connections and files."""
        raise NotImplementedError
