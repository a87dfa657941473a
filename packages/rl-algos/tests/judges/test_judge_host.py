"""The process of the judges, and the engines of rollout workers that it asks."""

import asyncio
from dataclasses import dataclass, field

from rl_algos.judges.answers import JudgeAnswer
from rl_algos.judges.config import GeneratorJudgeConfig
from rl_algos.judges.host import JudgeEngines, JudgeHost, JudgeHostSpec
from rl_core.errors import GeneratorError, WorkerDied
from rl_core.rollouts.judging import Question

QUESTIONS = [Question(({"role": "user", "content": f"question {number}"},)) for number in range(6)]


@dataclass
class Engine:
    """An engine that answers with its name, and dies at some call."""

    name: str
    dies_at: int | None = None
    error: Exception = field(default_factory=lambda: WorkerDied("killed"))
    asked: list[str] = field(default_factory=list)

    async def answer(self, judge: str, question: Question) -> JudgeAnswer:
        await asyncio.sleep(0.001)
        self.asked.append(question.messages[0]["content"])
        if self.dies_at is not None and len(self.asked) >= self.dies_at:
            raise self.error
        return JudgeAnswer(f"{self.name}: {question.messages[0]['content']}")


def test_questions_are_spread_and_those_of_a_dead_engine_are_asked_elsewhere() -> None:
    async def run() -> None:
        engines = JudgeEngines()
        first, second = Engine("a"), Engine("b", dies_at=2, error=GeneratorError("the engine died"))
        engines.join(first, 0, {"critic": ""})
        engines.join(second, 1, {"critic": ""})
        answers = await engines.ask("critic", QUESTIONS)
        assert [answer.text.partition(": ")[2] for answer in answers] == [
            question.messages[0]["content"] for question in QUESTIONS
        ]
        assert len(second.asked) == 3
        assert engines.num_workers == 1

    asyncio.run(run())


def test_questions_wait_until_a_rollout_worker_serves_the_judge() -> None:
    async def run() -> None:
        engines = JudgeEngines()
        engines.join(Engine("a", dies_at=1), 0, {"critic": "", "older": "v1"})
        asked = asyncio.create_task(engines.ask("critic", QUESTIONS[:2]))
        await asyncio.sleep(0.05)
        assert not asked.done()
        assert engines.num_workers == 0
        engines.join(Engine("other"), 1, {"older": "v2"})
        await asyncio.sleep(0.01)
        assert not asked.done()
        # The worker that took the place of the dead one has its number.
        engines.join(Engine("b"), 0, {"critic": "", "older": "v2"})
        assert [answer.text[:1] for answer in await asked] == ["b", "b"]
        assert engines.version("older") == "v2"

    asyncio.run(run())


def test_verdicts_of_weights_belong_to_their_version(tmp_path) -> None:
    judges = {
        name: GeneratorJudgeConfig(kind="generator", model_name=model)
        for name, model in (("itself", "policy"), ("fixed", "folder"), ("under_way", "policy"))
    }
    spec = JudgeHostSpec(judges, {}, tmp_path / "cache", None, {"fixed": "files"}, frozenset({"under_way"}))

    async def run(engine: Engine, version: str) -> list[str]:
        # Each host is a process that was started again: it waits for the version before it reads the cache.
        host = JudgeHost(spec)
        await host.start()
        found = [asyncio.create_task(host.ask(name, QUESTIONS[:1])) for name in judges]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in found)
        await host.join(engine, 0, {"itself": version, "under_way": version, "fixed": ""})
        texts = [verdict.text for task in found for verdict in await task]
        await host.close()
        return texts

    said = "question 0"
    assert asyncio.run(run(Engine("a"), "v1")) == [f"a: {said}"] * 3
    assert asyncio.run(run(Engine("b"), "v1")) == [f"a: {said}", f"a: {said}", f"b: {said}"]
    assert asyncio.run(run(Engine("c"), "v2")) == [f"c: {said}", f"a: {said}", f"c: {said}"]
