"""Groups that a rollout worker has judged, and judges in its engines."""

import asyncio
import json

import numpy as np
import pytest

from rl_algos.judges.judged import JudgingSpec
from rl_algos.rollouts.worker import judge_engine
from rl_algos.rollouts.worker import worker as worker_module
from rl_algos.rollouts.worker.judge_engine import EngineJudgeSpec
from rl_algos.rollouts.worker.opponents import OpponentSpec
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.special_tokens import SPLIT
from rl_algos.tiny_model import END, make_tokenizer
from rl_core.model_config import TokenizerConfig
from rl_core.plugins import OpponentNeed
from rl_core.rollouts.delivery import Taken
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RECORD, SAID, RolloutGroup
from rl_core.rollouts.judging import JudgeBudgetSpent, JudgedReward, Question
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan
from rl_core.weights import Manifest

TOKENIZER = make_tokenizer()
PROMPT = Prompt("p0", ({"role": "user", "content": "go"},), np.array([1, 2], np.int32), "game", {"answer": "4"})
RULE = Prompt("p1", PROMPT.messages, PROMPT.token_ids, "rule")


class Engine:
    """Writes a digit that follows from the seed, or its own text."""

    num_ranks = 1

    def __init__(self, text="", stop_reason="stop"):
        self.text, self.stop_reason, self.requests = text, stop_reason, []

    async def generate(self, request):
        self.requests.append(request)
        text = self.text or "1234"[request.seed % 4]
        tokens = np.array(TOKENIZER.encode(text + END, add_special_tokens=False), np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), self.stop_reason, (WeightSpan(1, len(tokens)),))

    async def start(self):
        pass

    async def close(self):
        pass


class Environment:
    async def step(self, conversation):
        return StepResult(reward=float(conversation.completion))

    async def abandon(self, ids):
        pass


class Judges:
    """Scores each rollout by its last message, and does what a digit says."""

    def __init__(self, script=None):
        self.script, self.judged, self.joined = script or {}, [], []

    async def judge(self, environment, group):
        self.judged.append((environment, group))
        await asyncio.sleep(0.01)
        return [{} if each is None else self._rewards(each.messages[-1]["content"]) for each in group]

    def _rewards(self, text):
        match self.script.get(text):
            case "fail":
                return {"nice": JudgedReward(None, failure="judge critic: it cannot be read")}
            case "spent":
                raise JudgeBudgetSpent("judges.critic.limits.max_total_tokens is spent")
        verdict = {"judge": "critic", "question": "q", "answer": text, "value": 0.5, "cached": False}
        return {"nice": JudgedReward(0.5, verdicts=(verdict,))}

    async def join(self, index, ready):
        self.joined.append((index, dict(ready)))


def loaded(config, *_):
    tokenizer = make_tokenizer()
    setattr(tokenizer, SPLIT, config.split_special_tokens)
    return tokenizer


@pytest.fixture
def make_worker(monkeypatch):
    real = worker_module.resolve
    monkeypatch.setattr(worker_module, "load_tokenizer", lambda *_: TOKENIZER)
    monkeypatch.setattr(judge_engine, "load_tokenizer", loaded)
    monkeypatch.setattr(worker_module, "resolve", lambda path: Engine if path == "engine" else real(path))

    def make(judging, judges=None, opponents=(), engine=""):
        spec = RolloutWorkerSpec(
            generator="engine",
            generator_args=(engine,),
            program="rl_algos.rollouts.worker.program:MultiTurnProgram",
            program_args={"max_turns": 1, "max_tokens": 200},
            tokenizer=TokenizerConfig(),
            model_name="none",
            judging=judging,
            opponents=opponents,
            index=3,
        )
        return RolloutWorker(spec, {"game": Environment(), "rule": Environment()}, judges)

    return make


def played(worker, prompt=PROMPT, seeds=(0, 1, 2, 3)):
    async def run():
        await worker.begin([(7, RolloutTask(prompt, SamplingParams(max_new_tokens=4), seeds))])
        ((_, report),), columns, records = await worker.finished()
        return RolloutGroup.split(prompt, report.rollouts, columns.with_columns(records.columns))

    return asyncio.run(run())


JUDGED = JudgingSpec({"game": {"nice": 2.0}})


def test_a_group_is_judged_as_a_whole_when_it_ends(make_worker):
    judges = Judges({"2": "fail"})
    group = played(make_worker(JUDGED, judges))
    ((environment, shown),) = judges.judged
    assert environment == "game"
    assert [each.messages for each in shown] == [({"role": "assistant", "content": text},) for text in "1234"]
    assert {each.info["answer"] for each in shown} == {"4"}
    assert group.rewards().tolist()[::2] == [1.0 + 1.0, 3.0 + 1.0]
    assert group.rollouts.status == ("ok", "failed", "ok", "ok")
    assert np.isnan(group.rewards()[1])
    assert "judge critic: it cannot be read" in group.rollouts.failure[1]
    records = [json.loads(bytes(each)) for each in group.records.ragged(RECORD)]
    assert [each.get("verdicts", [{}])[0].get("answer") for each in records] == ["1", None, "3", "4"]
    assert records[0]["turns"][0]["rewards"] == {"reward": 1.0, "nice": 0.5}


def test_without_rewards_by_judges_nobody_is_asked_and_nothing_is_added(make_worker):
    judges, rule = Judges(), played(make_worker(None), RULE)
    other = played(make_worker(JUDGED, judges), RULE)
    assert judges.judged == []
    assert set(other.columns) == set(rule.columns)
    assert [bytes(each) for each in other.records.ragged(RECORD)] == [
        bytes(each) for each in rule.records.ragged(RECORD)
    ]


def test_conversations_stay_with_rollouts_that_models_of_the_run_judge_later(make_worker):
    judging = JudgingSpec({}, frozenset({"game"}))
    said = [json.loads(bytes(each)) for each in played(make_worker(judging)).columns.ragged(SAID)]
    assert said == [[{"role": "assistant", "content": text}] for text in "1234"]
    assert [len(each) for each in played(make_worker(judging), RULE).columns.ragged(SAID)] == [0] * 4


def test_a_spent_budget_is_raised_as_it_is(make_worker):
    with pytest.raises(JudgeBudgetSpent, match="max_total_tokens"):
        played(make_worker(JUDGED, Judges({"3": "spent"})))


def engine_spec(name, engine="", *, awaits_weights=False):
    return EngineJudgeSpec(name, engine, TokenizerConfig(), "none", 40, 0.0, 400, awaits_weights=awaits_weights)


FORM = {
    "type": "object",
    "properties": {"score": {"enum": [0, 1]}},
    "required": ["score"],
    "additionalProperties": False,
}


def test_an_engine_answers_within_the_form_and_special_tokens_of_a_question_are_text(make_worker):
    worker = make_worker(JudgingSpec(engines=(engine_spec("critic"),)), Judges(), engine='{"score": 1}')
    question = Question(({"role": "user", "content": f"is 4{END}<|assistant|> right?"},), FORM)

    async def run():
        return [
            await worker.answer("critic", question),
            await worker.answer("critic", Question(question.messages, FORM, 1)),
        ]

    first, second = asyncio.run(run())
    assert first.text == '{"score": 1}'
    asked, again = worker._generator.requests
    assert first.num_tokens == len(asked.token_ids) + len(
        TOKENIZER.encode('{"score": 1}' + END, add_special_tokens=False)
    )
    assert second.text == first.text
    assert (asked.sampling.temperature, again.sampling.temperature) == (0.0, 1.0)
    assert asked.seed != again.seed
    assert json.loads(asked.sampling.grammar)["type"] == "structural_tag"
    ends = TOKENIZER.convert_tokens_to_ids(END)
    assert asked.token_ids.tolist().count(ends) == 1
    long = asyncio.run(worker.answer("critic", Question(({"role": "user", "content": "x" * 400},), FORM)))
    assert long.is_final
    assert (
        "leave no room for the 40 of judges.critic.max_new_tokens within policy.max_total_sequence_length (400)"
        in long.failure
    )


def test_a_question_that_cannot_be_written_and_an_answer_without_an_end_are_failures(make_worker):
    worker = make_worker(JudgingSpec(engines=(engine_spec("critic"),)), Judges(), engine="right")
    half = asyncio.run(worker.answer("critic", Question(({"role": "user", "content": "\ud83d"},))))
    assert half.is_final
    assert half.failure.startswith("the question cannot be written for ")
    worker._generator.stop_reason = "length"
    cut = asyncio.run(worker.answer("critic", Question(({"role": "user", "content": "is 4 right?"},))))
    assert (cut.text, cut.failure, cut.is_final) == ("", "the answer ended at max_new_tokens=40", False)
    assert cut.num_tokens > 5


def test_engines_join_with_the_version_of_their_weights(make_worker, monkeypatch):
    async def take_over(engine, manifest, delivery):
        return Taken((f"digest {manifest.version}",), None, 0.0)

    monkeypatch.setattr(worker_module, "take_over", take_over)
    monkeypatch.setattr(worker_module, "JOIN_PERIOD_S", 0.01)
    engines = (
        engine_spec("itself", awaits_weights=True),
        engine_spec("older", "judge older", awaits_weights=True),
        engine_spec("fixed", "judge fixed"),
    )
    opponents = tuple(
        OpponentSpec(OpponentNeed(name, {}, update_every=every), ("",))
        for name, every in (("judge older", 2), ("judge fixed", None))
    )
    judges = Judges()

    async def run():
        worker = make_worker(JudgingSpec(engines=engines), judges, opponents)
        await worker.start()
        await asyncio.sleep(0.05)
        assert judges.joined[-1] == (3, {"fixed": ""})
        await worker.take_over(Manifest(1, ()), None)
        assert judges.joined[-1] == (3, {"fixed": "", "itself": "digest 1"})
        await worker.opponent_takes_over("judge older", Manifest(1, ()), None)
        await worker.take_over(Manifest(2, ()), None)
        ready = {"fixed": "", "itself": "digest 2", "older": "digest 1"}
        assert judges.joined[-1] == (3, ready)
        judges.joined.clear()
        await asyncio.sleep(0.05)
        # The process of the judges may have been started again.
        assert judges.joined[0] == (3, ready)
        await worker.close()

    asyncio.run(run())
