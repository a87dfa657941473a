import asyncio
import dataclasses
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rl_algos.rollouts.recorded import RecordedTurns, TurnsRecorder, key_of
from rl_algos.rollouts.training.metrics import REFILLED, rollout_metrics
from rl_algos.rollouts.worker import worker as worker_module
from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_algos.rollouts.worker.programs import program_named
from rl_algos.rollouts.worker.worker import MAX_REFILLS, RolloutWorker, RolloutWorkerSpec
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import GeneratorError, RequestRefused
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.environment import EnvironmentFailure, KeptState, StepResult, TrainerState
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

PROMPT = Prompt("p0", ({"role": "user", "content": "hi"},), np.array([1, 2], np.int32), "game")


class SeedEcho:
    """A generator whose only token is the request's seed modulo 1000."""

    num_ranks = 1

    def __init__(self, failing: str, refused_seed: int = -1):
        self.failing, self.refused_seed = failing, refused_seed

    async def start(self):
        pass

    async def generate(self, request):
        if self.failing:
            raise GeneratorError(self.failing)
        if request.seed == self.refused_seed:
            raise RequestRefused("a prompt of 40 tokens leaves no room")
        tokens = np.array([request.seed % 1000], np.int32)
        return Completion(tokens, np.zeros(1, np.float32), "stop", (WeightSpan(3, 1),))


class Environment:
    def __init__(self, answer):
        self.answer, self.abandoned = answer, []

    async def step(self, conversation):
        return self.answer(conversation)

    async def abandon(self, ids):
        self.abandoned += ids


class Tokenizer:
    """Decodes to the ids; renders as the tiny model's."""

    def __init__(self):
        self._real = make_tokenizer()

    def __getattr__(self, name):
        return getattr(self._real, name)

    def decode(self, ids, skip_special_tokens, **settings):
        return str(ids)


@pytest.fixture
def make_worker(monkeypatch):
    monkeypatch.setattr(worker_module, "load_tokenizer", lambda *_: Tokenizer())

    def make(answer, failing="", refused_seed=-1):
        spec = RolloutWorkerSpec(
            generator=f"{__name__}:SeedEcho",
            generator_args=(failing, refused_seed),
            program="rl_algos.rollouts.worker.program:MultiTurnProgram",
            program_args={"max_turns": 1, "max_tokens": 10},
            tokenizer=TokenizerConfig(),
            model_name="none",
        )
        monkeypatch.setattr(
            worker_module, "resolve", lambda path: SeedEcho if path.endswith("SeedEcho") else resolve(path)
        )
        environment = Environment(answer)
        worker = RolloutWorker(spec, {"game": environment})
        worker._spec = spec
        return worker, environment

    from rl_core.plugins import resolve

    return make


def test_the_environment_is_told_how_a_turn_was_sampled(make_worker):
    seen = []

    def answer(conversation):
        seen.append(conversation)
        return StepResult(1.0)

    worker, _ = make_worker(answer)
    worker._services.max_steps = 7

    async def run():
        await worker.start()
        await worker.begin([(0, task(5))])
        await taken(worker, 1)

    asyncio.run(run())
    [conversation] = seen
    assert conversation.completion_ids.tolist() == [5]
    assert [message["role"] for message in conversation.prompt_messages] == ["user"]
    assert [message["role"] for message in conversation.completion_messages] == ["assistant"]
    # the third weights have been trained for two steps
    assert conversation.trainer_state == TrainerState(global_step=2, max_steps=7)


def task(*seeds):
    return RolloutTask(PROMPT, SamplingParams(max_new_tokens=2), seeds)


async def taken(worker, count):
    """Groups by number, as they finish, until there are so many."""
    groups = {}
    while len(groups) < count:
        reports, columns, records = await worker.finished()
        rows = columns.with_columns(records.columns).split([len(report.rollouts) for _, report in reports])
        for (number, report), own in zip(reports, rows, strict=True):
            groups[number] = RolloutGroup(PROMPT, report.rollouts, own)
    return groups


def last_tokens(group):
    return [tokens[-1] for tokens in group.columns.ragged("tokens")]


def run(worker, *seeds):
    async def run():
        await worker.begin([(7, task(*seeds))])
        return (await taken(worker, 1))[7]

    return asyncio.run(run())


def test_groups_are_recorded_in_the_order_in_which_they_end_while_the_worker_does_other_work(make_worker, tmp_path):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    worker._recorder = TurnsRecorder(tmp_path)
    write, goes_on, written = worker._recorder.write, threading.Event(), []

    def slow_write(key, turns):
        assert goes_on.wait(30), "the loop stood still"
        write(key, turns)
        written.append(key)

    worker._recorder.write = slow_write

    async def play():
        groups = {number: task(number, number + 100) for number in range(5)}
        await worker.begin(list(groups.items()))
        while len(await worker.turns()) < 5:
            await asyncio.sleep(0.001)
        # A group that is not recorded has not finished, and keeps its turns.
        assert (len(written), len(worker._finished), len(await worker.turns())) == (0, 0, 5)
        goes_on.set()
        return groups, list(await taken(worker, 5))

    groups, order = asyncio.run(play())
    assert written == [key_of(groups[number], worker._services.version) for number in order]
    found = RecordedTurns(tmp_path)
    assert found.keys == written
    for number, key in zip(order, written, strict=True):
        completions = [completion for turns in found.read(key) for completion in turns.completions.values()]
        assert [each.token_ids.tolist() for each in completions] == [[number], [number + 100]]


def test_a_group_that_cannot_be_recorded_is_reported(make_worker, tmp_path):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    worker._recorder = TurnsRecorder(tmp_path / "turns")
    (tmp_path / "turns").rmdir()
    with pytest.raises(FileNotFoundError, match="turns"):
        run(worker, 5)


def test_rollouts_of_a_group_come_in_the_order_of_their_seeds(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    group = run(worker, 5, 6, 7)
    assert last_tokens(group) == [5, 6, 7]
    assert group.rewards().tolist() == [1, 1, 1]


def test_a_demonstration_is_scored_like_a_sampled_rollout_and_changes_no_other(make_worker):
    seen = []

    def answer(conversation):
        seen.append((conversation.completion, conversation.completion_ids.tolist(), conversation.truncated))
        return StepResult(reward=float(len(conversation.completion_ids)))

    worker, _ = make_worker(answer)
    shown = dataclasses.replace(PROMPT, demonstration=np.array([8, 9, 3], np.int32))

    async def play():
        own = dataclasses.replace(task(5, 6, 7), prompt=shown)
        await worker.begin([(0, own)])
        [plain] = (await taken(worker, 1)).values()
        await worker.begin([(1, dataclasses.replace(own, num_demonstrated=1))])
        return plain, (await taken(worker, 1))[1]

    plain, group = asyncio.run(play())
    assert seen[-1] == ("[8, 9, 3]", [8, 9, 3], False)
    assert last_tokens(plain) == [5, 6, 7]
    assert last_tokens(group) == [5, 6, 3]
    assert group.rewards().tolist() == [1, 1, 3]
    assert (plain.rollouts.is_demonstration, group.rollouts.is_demonstration) == ((), (False, False, True))
    # nobody sampled these tokens, with any weights
    assert group.rollouts.spans[2] == ((-1, 3),)
    assert group.columns.ragged("generation_logprobs")[2].tolist() == [0] * 5
    assert group.columns.ragged("loss_mask")[2].tolist() == [0, 0, 1, 1, 1]
    record = json.loads(bytes(group.columns.ragged("record")[2]))
    assert (record["demonstration"], record["weight_versions"], record["weight_spans"]) == (True, [], [])
    assert "demonstration" not in json.loads(bytes(group.columns.ragged("record")[1]))


def test_a_group_is_a_report_apart_from_its_columns_and_from_what_people_read(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0, info={"seen": 2, "note": "fine"}))

    async def run():
        await worker.begin([(7, task(5, 6))])
        return await worker.finished()

    ((number, report),), columns, records = asyncio.run(run())
    assert number == 7
    assert [(r.num_tokens, r.num_sampled, r.num_turns, r.info) for r in report.rollouts] == [(3, 1, 1, {"seen": 2})] * 2
    assert (list(columns), list(records)) == (list(report.columns), list(report.records))
    assert [tokens.tolist() for tokens in columns.ragged("tokens")] == [[1, 2, 5], [1, 2, 6]]
    second = json.loads(bytes(records.ragged("record")[1]))
    assert (second["index"], second["turns"][0]["text"], second["info"]["note"]) == (1, "[6]", "fine")


def test_an_environment_failure_costs_one_rollout_and_says_why(make_worker):
    def answer(conversation):
        return (
            EnvironmentFailure("the verifier hung", "deadline")
            if "[6]" in conversation.completion
            else StepResult(reward=1.0)
        )

    worker, environment = make_worker(answer)
    group = run(worker, 5, 6, 7)
    assert [rollout.status for rollout in group.rollouts] == ["ok", "failed", "ok"]
    assert "the verifier hung" in group.rollouts[1].failure
    assert environment.abandoned == []


def test_a_rollout_whose_infrastructure_fails_begins_again_and_is_the_same(make_worker):
    def play():
        asked = []

        def answer(conversation):
            asked.append(conversation.completion)
            fails = num_failures and len(asked) > 1 and asked[1] == asked[-1] and asked.count(asked[1]) <= num_failures
            return EnvironmentFailure("its process was killed", "process") if fails else StepResult(reward=1.0)

        worker, _ = make_worker(answer)
        return run(worker, 5, 6, 7), asked

    num_failures = 0
    whole, _ = play()
    num_failures = 2  # of the second rollout
    group, asked = play()
    assert [rollout.status for rollout in group.rollouts] == ["ok"] * 3
    assert group.rollouts.info == ({}, {REFILLED: 2}, {})
    assert rollout_metrics([group])["rollout/refilled"] == 1.0
    assert last_tokens(group) == last_tokens(whole)
    assert (len(asked), len(set(asked))) == (5, 3)


def test_a_rollout_that_has_begun_again_is_the_same_elsewhere(make_worker):
    whole, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    expected = run(whole, 5, 6)
    asked = []

    async def hangs(conversation):
        asked.append(conversation.completion)
        if len(asked) == 1:
            return EnvironmentFailure("its process was killed", "process")
        await asyncio.Event().wait()

    async def killed():
        worker, environment = make_worker(None)
        environment.step = hangs
        await worker.begin([(7, task(5, 6))])
        while len(asked) < 3:  # both rollouts, and the second try of the first
            await asyncio.sleep(0)
        turns = (await worker.turns())[7]
        for running in worker._under_way:
            running.cancel()
        return turns

    turns = asyncio.run(killed())
    assert [len(each.completions) for each in turns] == [1, 1]
    again, _ = make_worker(lambda conversation: StepResult(reward=1.0))

    async def resumed():
        await again.begin([(7, dataclasses.replace(task(5, 6), turns=turns))])
        return (await taken(again, 1))[7]

    group = asyncio.run(resumed())
    assert last_tokens(group) == last_tokens(expected)
    assert group.rollouts.info == ({}, {})


def test_a_rollout_is_refilled_a_few_times_and_then_fails(make_worker):
    asked = []

    def answer(conversation):
        asked.append(conversation.completion)
        return EnvironmentFailure("no sandbox started", "process")

    worker, _ = make_worker(answer)
    group = run(worker, 5)
    assert "no sandbox started" in group.rollouts[0].failure
    assert len(asked) == MAX_REFILLS + 1
    assert len(set(asked)) == 1


def test_a_conversation_left_open_is_abandoned(make_worker):
    worker, environment = make_worker(lambda c: StepResult(done=False, observation=({"role": "user", "content": "?"},)))
    worker._program = MultiTurnProgram(max_turns=2, max_tokens=100)
    run(worker, 5)
    assert len(environment.abandoned) == 1


def test_a_completion_that_is_interrupted_goes_on_with_the_weights_that_follow(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    answers = [([8], "abort", 1), ([], "abort", 2), ([9], "stop", 3)]
    requests = []

    async def generate(request):
        requests.append((request.token_ids.tolist(), request.num_sampled, request.sampling.max_new_tokens))
        tokens, reason, version = answers.pop(0)
        spans = (WeightSpan(version, len(tokens)),) if tokens else ()
        return Completion(np.array(tokens, np.int32), np.full(len(tokens), -version, np.float32), reason, spans)

    worker._generator.generate = generate
    group = run(worker, 5)
    assert group.columns.ragged("tokens")[0].tolist() == [1, 2, 8, 9]
    assert group.columns.ragged("generation_logprobs")[0].tolist() == [0, 0, -1, -3]
    assert group.rollouts[0].spans == (WeightSpan(1, 1), WeightSpan(3, 1))
    assert (group.rollouts[0].stop_reason, group.rollouts[0].status) == ("stop", "ok")
    assert requests == [([1, 2], 0, 2), ([1, 2, 8], 1, 1), ([1, 2, 8], 1, 1)]


def test_interruptions_of_a_rollout_of_several_turns_repeat_no_turn_and_lose_no_span(make_worker):
    stepped = []

    def answer(conversation):
        stepped.append(conversation.completion)
        done = len(stepped) == 2
        return StepResult(reward=1.0, done=done, observation=() if done else ({"role": "user", "content": "?"},))

    worker, _ = make_worker(answer)
    worker._program = MultiTurnProgram(max_turns=2, max_tokens=1000)
    parts = [([8], "abort", 1), ([9, 10], "stop", 2), ([], "abort", 2), ([11], "abort", 3), ([12], "stop", 5)]
    seeds = []

    async def generate(request):
        seeds.append((request.seed, request.num_sampled))
        tokens, reason, version = parts.pop(0)
        spans = (WeightSpan(version, len(tokens)),) if tokens else ()
        return Completion(np.array(tokens, np.int32), np.full(len(tokens), -version, np.float32), reason, spans)

    worker._generator.generate = generate
    many = dataclasses.replace(task(5), sampling=SamplingParams(max_new_tokens=8))

    async def run():
        await worker.begin([(7, many)])
        return (await taken(worker, 1))[7]

    group = asyncio.run(run())
    sampled = group.columns.ragged("loss_mask")[0] == 1
    assert group.columns.ragged("tokens")[0][sampled].tolist() == [8, 9, 10, 11, 12]
    assert group.columns.ragged("generation_logprobs")[0][sampled].tolist() == [-1, -2, -2, -3, -5]
    assert group.rollouts[0].spans == (WeightSpan(1, 1), WeightSpan(2, 2), WeightSpan(3, 1), WeightSpan(5, 1))
    assert stepped == ["[8, 9, 10]", "[11, 12]"]
    (first, second) = dict.fromkeys(seed for seed, _ in seeds)
    assert seeds == [(first, 0), (first, 1), (second, 0), (second, 0), (second, 1)]


class Sleeper:
    """A generator whose requests end when it is told, or with one token when it is interrupted."""

    def __init__(self, *, keeps_weights):
        self.keeps_weights, self.version = keeps_weights, 1
        self.inside = {}
        self.serving = asyncio.Event()
        self.serving.set()

    async def generate(self, request):
        while not self.serving.is_set():
            await self.serving.wait()
        future = asyncio.get_running_loop().create_future()
        self.inside[future] = request
        return await future

    def end(self, token, reason):
        inside, self.inside = self.inside, {}
        for future in inside:
            spans = (WeightSpan(self.version, 1),)
            future.set_result(Completion(np.array([token], np.int32), np.zeros(1, np.float32), reason, spans))

    async def pause(self, mode):
        assert mode == "interrupt"
        self.serving.clear()
        self.end(8, "abort")

    async def resume(self):
        self.serving.set()

    async def sleep(self):
        assert not self.inside
        return self.keeps_weights

    async def wake(self):
        pass


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_rollouts_in_progress_sleep_with_the_engine_and_their_time_limit_does_not_run(make_worker, keeps_weights):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    engine = Sleeper(keeps_weights=keeps_weights)
    worker._generator = worker._services.generator = engine
    worker._max_seconds = 0.1

    async def run():
        await worker.begin([(7, task(5, 6))])
        while len(engine.inside) < 2:
            await asyncio.sleep(0)
        await worker.generator("sleep")
        await asyncio.sleep(0.15)
        assert not engine.inside
        await worker.generator("wake")
        assert engine.serving.is_set() == keeps_weights
        if not keeps_weights:
            engine.version = 2
            await worker.generator("resume")
        while len(engine.inside) < 2:
            await asyncio.sleep(0)
        engine.end(9, "stop")
        group = (await taken(worker, 1))[7]
        # their clocks run again
        await worker.begin([(8, task(5))])
        return group, (await taken(worker, 1))[8]

    group, late = asyncio.run(run())
    assert [tokens.tolist() for tokens in group.columns.ragged("tokens")] == [[1, 2, 8, 9]] * 2
    spans = ((1, 2),) if keeps_weights else ((1, 1), (2, 1))
    assert group.rollouts.spans == (spans, spans)
    assert "max_rollout_s" in late.rollouts[0].failure
    assert not worker._limits


class Dialogue:
    """A generator that counts its answers, and an environment of three turns."""

    def __init__(self, *, question="?", hangs_at=None):
        self.question, self.hangs_at = question, hangs_at
        self.sampled, self.version = [], 1

    async def generate(self, request):
        if len(self.sampled) == self.hangs_at:
            await asyncio.Event().wait()
        self.sampled.append(request.seed)
        await asyncio.sleep(0)  # the other rollout's turn
        tokens = np.array([request.seed % 89 + 3], np.int32)
        logprobs = np.full(1, -self.version, np.float32)
        return Completion(tokens, logprobs, "stop", (WeightSpan(self.version, 1),))

    def answer(self, conversation):
        if conversation.turn == 2:
            return StepResult(reward=1.0)
        return StepResult(done=False, observation=({"role": "user", "content": self.question},), state=KeptState())

    def worker(self, make_worker):
        worker, _ = make_worker(self.answer)
        worker._program = MultiTurnProgram(max_turns=3, max_tokens=1000)
        worker._generator.generate = self.generate
        return worker


def columns_of(group):
    return {name: [row.tolist() for row in group.columns.ragged(name)] for name in group.columns if name != "record"}


def turns_under_way(make_worker, *, hangs_at):
    """Turns so far of group 7, once its engine hangs at so many answers."""

    async def run():
        dialogue = Dialogue(hangs_at=hangs_at)
        worker = dialogue.worker(make_worker)
        await worker.begin([(7, task(5, 6))])
        found = {}
        while sum(len(each.completions) for each in found.get(7, ())) < hangs_at:
            await asyncio.sleep(0)
            found = await worker.turns()
        for running in worker._under_way:
            running.cancel()
        return found

    return asyncio.run(run())


def test_a_rollout_goes_on_from_turns_that_another_worker_has_finished(make_worker):
    whole = run(Dialogue().worker(make_worker), 5, 6)
    ((number, turns),) = turns_under_way(make_worker, hangs_at=3).items()
    assert (number, [len(each.completions) for each in turns]) == (7, [2, 1])
    dialogue = Dialogue()
    dialogue.version = 4
    worker = dialogue.worker(make_worker)

    async def go_on():
        await worker.begin([(8, dataclasses.replace(task(5, 6), turns=turns))])
        return (await taken(worker, 1))[8], await worker.turns()

    group, left = asyncio.run(go_on())
    assert len(dialogue.sampled) == 3
    assert columns_of(group)["tokens"] == columns_of(whole)["tokens"]
    assert [rollout.spans for rollout in group.rollouts] == [
        (WeightSpan(1, 1), WeightSpan(1, 1), WeightSpan(4, 1)),
        (WeightSpan(1, 1), WeightSpan(4, 1), WeightSpan(4, 1)),
    ]
    assert left == {}


def test_turns_behind_another_answer_of_the_environment_are_sampled_anew(make_worker):
    turns = turns_under_way(make_worker, hangs_at=4)[7]
    assert [len(each.completions) for each in turns] == [2, 2]
    dialogue = Dialogue(question="and now?")
    worker = dialogue.worker(make_worker)

    async def go_on():
        await worker.begin([(8, dataclasses.replace(task(5, 6), turns=turns))])
        return (await taken(worker, 1))[8]

    group = asyncio.run(go_on())
    assert len(dialogue.sampled) == 4
    assert columns_of(group) == columns_of(run(Dialogue(question="and now?").worker(make_worker), 5, 6))


def test_a_dead_engine_is_no_failed_rollout_but_an_error(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(), failing="the engine died")
    with pytest.raises(GeneratorError, match="the engine died"):
        run(worker, 5, 6)


def test_a_refused_request_costs_its_rollout_and_says_why(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0), refused_seed=6)
    group = run(worker, 5, 6, 7)
    assert [rollout.status for rollout in group.rollouts] == ["ok", "failed", "ok"]
    assert "leaves no room" in group.rollouts[1].failure


def test_a_conversation_that_cannot_be_freed_costs_nothing(make_worker):
    worker, environment = make_worker(lambda conversation: EnvironmentFailure("the verifier hung"))

    async def refuse(conversation_ids):
        raise RuntimeError("the environment's process ended")

    async def hang(conversation):
        raise TimeoutError("no answer")

    environment.abandon, environment.step = refuse, hang
    group = run(worker, 5)
    assert "no answer" in group.rollouts[0].failure


def test_groups_are_given_out_as_they_finish_while_others_are_under_way(make_worker):
    held = asyncio.Event()

    class Holding:
        async def step(self, conversation):
            if "[5]" in conversation.completion:
                await held.wait()
            return StepResult(reward=1.0)

    async def run():
        worker, _ = make_worker(None)
        worker._services.environments = {"game": Holding()}
        await worker.begin([(1, task(5)), (2, task(6))])
        second = await taken(worker, 1)
        held.set()
        return second, await taken(worker, 1)

    second, first = asyncio.run(run())
    assert [(number, last_tokens(group)) for number, group in (*second.items(), *first.items())] == [(2, [6]), (1, [5])]


def finished_after_all_ended(worker, *tasks):
    """Answers of a worker that was asked when all of these groups had ended."""

    async def run():
        await worker.begin(list(enumerate(tasks)))
        await asyncio.gather(*worker._under_way, return_exceptions=True)
        await asyncio.sleep(0)
        answers = []
        while worker._finished:
            try:
                answers.append(await worker.finished())
            except GeneratorError as error:
                answers.append(error)
        return answers

    return asyncio.run(run())


def test_groups_that_have_finished_meanwhile_are_given_out_together(make_worker, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_TOGETHER", 2)
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    first, second = finished_after_all_ended(worker, task(5, 6), task(7), task(8))
    assert [number for number, _ in first[0]] == [0, 1]
    assert [tokens[-1] for tokens in first[1].ragged("tokens")] == [5, 6, 7]
    assert [len(first[2]), len(second[1])] == [3, 1]


def test_a_group_that_the_engine_failed_does_not_hide_those_before_it(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    answer = worker._generator.generate

    async def generate(request):
        if request.seed == 6:
            raise GeneratorError("the engine died")
        return await answer(request)

    worker._generator.generate = generate
    (reports, _, _), failure, (others, _, _) = finished_after_all_ended(worker, task(5), task(6), task(7))
    assert [[number for number, _ in found] for found in (reports, others)] == [[0], [2]]
    assert str(failure) == "the engine died"


def test_groups_with_other_columns_are_given_out_apart(make_worker):
    """A failed rollout has no routed experts, so neither has its group."""
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0), refused_seed=6)
    play = worker._program.run

    async def run(prompt, client):
        rollout = await play(prompt, client)
        return dataclasses.replace(rollout, routed_experts=np.zeros((len(rollout.tokens), 1, 1), np.int16))

    worker._program = SimpleNamespace(run=run)
    answers = finished_after_all_ended(worker, task(5), task(6), task(7))
    assert [("routed_experts" in columns, len(reports)) for reports, columns, _ in answers] == [
        (True, 1),
        (False, 1),
        (True, 1),
    ]


def test_requests_of_groups_begun_together_reach_the_engine_in_order_and_before_any_answer(make_worker):
    asked = []

    async def run():
        worker, _ = make_worker(lambda conversation: StepResult())
        answer = worker._generator.generate

        async def generate(request):
            asked.append(request.seed)
            await asyncio.sleep(0)
            assert len(asked) == 4
            return await answer(request)

        worker._generator.generate = generate
        await worker.begin([(1, task(5, 6)), (2, task(7, 8))])
        await taken(worker, 2)

    asyncio.run(run())
    assert asked == [5, 6, 7, 8]


def test_groups_may_be_asked_for_before_the_message_that_begins_them(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0, done=True))

    async def run():
        asked = asyncio.create_task(taken(worker, 1))
        await asyncio.sleep(0)
        await worker.begin([(3, task(5))])
        return await asked

    assert [rollout.reward for rollout in asyncio.run(run())[3].rollouts] == [1.0]


def test_rollouts_are_written_with_their_advantages_in_the_order_asked_for(make_worker, tmp_path):
    worker, _ = make_worker(lambda conversation: StepResult(reward=1.0))
    path = tmp_path / "step_1.jsonl"

    async def run():
        await worker.begin([(1, task(5, 6)), (2, task(7))])
        groups = await taken(worker, 2)
        stores = [groups[number].columns.only(["record"]) for number in (1, 2)]
        part, row = np.array([1, 0, 0]), np.array([0, 1, 0])
        await worker.write_rollouts(str(path), part, row, [0.5, None, float("nan")], *stores)

    asyncio.run(run())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["turns"][0]["text"], each["advantage"]) for each in rows] == [
        ("[7]", 0.5),
        ("[6]", None),
        ("[5]", None),
    ]


def test_a_rollout_past_its_deadline_fails_with_the_reason(make_worker):
    worker, environment = make_worker(None)
    worker._max_seconds = 0.01
    hung = asyncio.Event()

    async def hang(conversation):
        await hung.wait()

    environment.step = hang
    group = run(worker, 5)
    assert "took longer than the 0.01 s that max_rollout_s allows" in group.rollouts[0].failure
    assert len(environment.abandoned) == 1


def test_a_time_out_of_something_else_is_told_as_it_is(make_worker):
    worker, environment = make_worker(None)
    worker._max_seconds = 1000.0

    async def late(conversation):
        raise TimeoutError("the server is late")

    environment.step = late
    assert run(worker, 5).rollouts[0].failure == "TimeoutError: the server is late"


PROGRAM = """
import numpy as np
from rl_core.rollouts.rollout import Rollout


class Twice:
    def __init__(self, *, max_turns, max_tokens):
        self.max_tokens = max_tokens

    async def run(self, prompt, client):
        first = await client.generate(prompt.token_ids)
        second = await client.generate(np.concatenate([prompt.token_ids, first.token_ids]))
        sampled = np.concatenate([first.token_ids, second.token_ids])
        tokens = np.concatenate([prompt.token_ids, sampled])
        mask = np.array([0] * len(prompt.token_ids) + [1] * len(sampled), np.uint8)
        spans = (*first.spans, *second.spans)
        return Rollout(
            prompt.id, tokens, mask, np.zeros(len(tokens), np.float32), spans, (), {"reward": 1.0}, second.stop_reason
        )
"""


def test_a_program_of_the_users_own_is_built_from_its_file(tmp_path, make_worker):
    (tmp_path / "agent.py").write_text(PROGRAM)
    worker, _ = make_worker(None)
    spec = dataclasses.replace(worker._spec, program=program_named(f"{tmp_path}/agent.py:Twice"))
    group = run(RolloutWorker(spec, worker._services.environments), 5)
    assert group.columns.ragged("tokens")[0][:3].tolist() == [1, 2, 5]
    assert group.columns.ragged("loss_mask")[0].tolist() == [0, 0, 1, 1]


def played(worker, *seeds):
    """The rollouts of a group."""

    async def run():
        await worker.start()
        await worker.begin([(0, task(*seeds))])
        return await taken(worker, 1)

    return asyncio.run(run())[0]


def test_rollouts_of_a_play_lie_together_and_a_failed_play_is_one_of_them(make_worker):
    def answer(conversation):
        if conversation.completion_ids.tolist() == [6]:
            raise ValueError("bad move")
        if conversation.agent:
            return StepResult(reward=2.0)
        return StepResult(
            done=False, observation=({"role": "user", "content": "go"},), agent="first", next_agent="second"
        )

    worker, _ = make_worker(answer)
    worker._program = MultiTurnProgram(max_turns=1, max_tokens=100)
    group = played(worker, 1, 6, 3)
    assert group.rollouts.agents == ("first", "second", "", "first", "second")
    assert group.rollouts.plays == (0, 0, 1, 2, 2)
    assert group.num_plays == 3
    assert group.rollouts.status == ("ok", "ok", "failed", "ok", "ok")
    records = [json.loads(bytes(record)) for record in group.records.ragged("record")]
    assert [(each["index"], each["agent"], each["play"]) for each in records] == [
        (0, "first", 0),
        (1, "second", 0),
        (2, "", 1),
        (3, "first", 2),
        (4, "second", 2),
    ]


def test_rollouts_of_one_agent_are_plays_of_their_own(make_worker):
    worker, _ = make_worker(lambda conversation: StepResult(1.0))
    group = played(worker, 1, 2)
    assert (group.rollouts.play, group.rollouts.agent, group.rollouts.plays) == ((), (), (0, 1))


def test_a_program_without_a_rollout_fails_its_play(make_worker):
    class Empty:
        async def run(self, prompt, client):
            return []

    worker, _ = make_worker(lambda conversation: StepResult(1.0))
    worker._program = Empty()
    assert "the rollout program returned no rollout" in played(worker, 1).rollouts.failure[0]
