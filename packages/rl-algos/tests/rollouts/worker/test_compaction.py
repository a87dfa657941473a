"""Conversations whose history is summarised: their segments, masks and rewards, written out by hand."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.training.metrics import rollout_metrics
from rl_algos.rollouts.training.segments import ROLLOUT, rollout_numbers
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.client import PlayClient, PlayServices
from rl_algos.rollouts.worker.program import CompactionProgram
from rl_algos.rollouts.worker.programs import argument_problem
from rl_algos.rollouts.worker.written import make_tokenizer
from rl_algos.tokenizer import encode_prompt
from rl_core.data.batch import TOKENS
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

TOKENIZER = make_tokenizer()
CHAT = Chat(TOKENIZER)
ASKED = ({"role": "system", "content": "S"}, {"role": "user", "content": "task"})
PROMPT = Prompt("p0", ASKED, encode_prompt(TOKENIZER, list(ASKED)), "game")
SEE = "<|system|>S<|end|><|user|>task<|end|><|assistant|>"


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


class Engine:
    """Says the next of its texts, or the same text for the same request; logprobs count up over all tokens."""

    def __init__(self, texts):
        self.texts, self.requests, self.num_sampled = list(texts), [], 0

    async def generate(self, request):
        self.requests.append(request)
        text = self.texts.pop(0)
        sampled = [*ids(text), TOKENIZER.eos_token_id]
        kept = sampled[: request.sampling.max_new_tokens]
        logprobs = -0.001 * np.arange(self.num_sampled + 1, self.num_sampled + 1 + len(kept))
        self.num_sampled += len(kept)
        reason = "stop" if len(kept) == len(sampled) else "length"
        return Completion(np.array(kept, np.int32), logprobs.astype(np.float32), reason, (WeightSpan(1, len(kept)),))


class Game:
    """Answers with its texts in turn; a reward for each."""

    def __init__(self, texts, rewards=None, role="user"):
        self.texts, self.rewards, self.role, self.seen = list(texts), list(rewards or []), role, []

    async def step(self, conversation):
        self.seen.append(conversation)
        reward = self.rewards.pop(0) if self.rewards else 0.0
        if not self.texts:
            return StepResult(reward)
        answer = {"role": self.role, "content": self.texts.pop(0)}
        if self.role == "tool":
            answer["tool_call_id"] = "call00000"
        return StepResult(reward, done=False, observation=(answer,))

    async def abandon(self, conversation_ids):
        pass


def play(engine, game, *, prompt=PROMPT, max_tokens=100, new=20, opponents=None, earlier=None, **args):
    services = PlayServices(engine, CHAT, {"game": game}, max_steps=1)
    sampling = SamplingParams(new, stop_token_ids=(TOKENIZER.eos_token_id,))
    client = PlayClient(services, prompt, sampling, 5, earlier or RolloutTurns(), opponents or {})
    program = CompactionProgram(**{"max_turns": 9, "max_tokens": max_tokens, "request": "sum up", **args})
    return asyncio.run(program.run(prompt, client)), client


def segments_of(rollout):
    """Text of each segment, with what was sampled in it between angles."""
    ends = np.cumsum(rollout.segments or (len(rollout.tokens),))
    shown = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        text = ""
        for is_sampled, places in itertools.groupby(range(begin, end), key=lambda place: rollout.loss_mask[place]):
            part = TOKENIZER.decode(rollout.tokens[list(places)].tolist())
            text += f"«{part}»" if is_sampled else part
        shown.append(text)
    return shown


def test_a_summary_takes_the_place_of_all_turns_and_is_trained():
    engine, game = Engine(["a long first turn", "note 7", "a2", "a3"]), Game(["o1 is long", "o2"], [0.25, 0.5, 1.0])
    rollout, _ = play(engine, game, compact_at=40, summary_tokens=9)
    assert segments_of(rollout) == [
        f"{SEE}«a long first turn<|end|>»<|user|>sum up<|end|><|assistant|>«note 7<|end|>»",
        f"{SEE}note 7<|end|><|user|>o1 is long<|end|><|assistant|>«a2<|end|>»<|user|>o2<|end|><|assistant|>«a3<|end|>»",
    ]
    # The environment sees the conversation as if nothing had been summarised.
    texts = [message["content"] for message in game.seen[-1].messages]
    assert texts == ["S", "task", "a long first turn", "o1 is long", "a2", "o2", "a3"]
    assert game.seen[-1].num_prompt_messages == 2
    assert [turn.num_sampled for turn in rollout.turns] == [18, 7, 3, 3]
    assert [turn.rewards for turn in rollout.turns] == [
        {"reward": 0.25},
        {"reward": 0.0},
        {"reward": 0.5},
        {"reward": 1.0},
    ]
    assert (rollout.reward, rollout.status, rollout.num_sampled) == (1.75, "ok", 31)
    sampled = rollout.generation_logprobs[rollout.loss_mask > 0]
    assert sampled == pytest.approx(-0.001 * np.arange(1, 32), abs=1e-6)
    # The prompt has 10 tokens, an answer of 10 characters 13, and the end of a turn 1.
    assert rollout.info == {
        "compaction/count": 1.0,
        "compaction/tokens_before": 10 + 18 + 13,
        "compaction/tokens_after": 10 + 7 + 13,
    }


def test_segments_are_rows_that_share_the_advantage_and_metrics_count_compactions():
    compacted, _ = play(Engine(["a1", "note", "a2"]), Game(["o1 is long"], [0.0, 1.0]), compact_at=20)
    whole, _ = play(Engine(["a1", "a2"]), Game(["o"], [0.0, 0.0]), compact_at=60)
    group = RolloutGroup.of(PROMPT, [compacted, whole])
    assert rollout_numbers([group]).tolist() == [0, 0, 1]
    assert group.rewards().tolist() == [1.0, 0.0]
    rows = [row.sum() for row in group.columns.ragged(LOSS_MASK)]
    assert rows == [3 + 5, 3, 6]
    assert [len(row) for row in group.columns.ragged(TOKENS)] == [*compacted.segments, len(whole.tokens)]
    batch = build_batch([group], GRPOConfig(rollout_program="compaction"))
    assert batch.array(ROLLOUT).tolist() == [0, 0, 1]
    metrics = rollout_metrics([group])
    assert metrics["rollout/compaction/count"] == 0.5
    assert metrics["rollout/compaction/tokens_after"] == compacted.info["compaction/tokens_after"]


def test_the_result_of_a_tool_keeps_its_call():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
    prompt = replace(PROMPT, tools=tools)
    engine, game = Engine([f"x{call}", "note", "done"]), Game(["a long result"], role="tool")
    rollout, _ = play(engine, game, prompt=prompt, max_tokens=200, new=90, compact_at=30, summary_tokens=9)
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert segments_of(rollout) == [
        f"{SEE}«x{call}<|end|>»<|tool|>sum up<|end|><|assistant|>«note<|end|>»",
        f"{SEE}note{written}<|end|><|tool|>a long result<|end|><|assistant|>«done<|end|>»",
    ]


def test_a_second_summary_replaces_the_first():
    engine, game = Engine(["a1", "one", "a2", "two", "a3"]), Game(["o1 is long", "o2 is long"])
    rollout, _ = play(engine, game, compact_at=25, summary_tokens=9)
    assert segments_of(rollout)[2] == f"{SEE}two<|end|><|user|>o2 is long<|end|><|assistant|>«a3<|end|>»"
    assert rollout.info["compaction/count"] == 2


def test_recent_turns_are_kept_without_a_summary():
    engine, game = Engine(["a1", "a2", "a3", "a4"]), Game(["o1", "o2", "o3"])
    rollout, _ = play(engine, game, compact_at=25, summary_tokens=9, summariser="recent")
    turn = "<|end|><|user|>{}<|end|><|assistant|>"
    # A turn with its answer has 8 tokens, so one is kept with the newest turn.
    assert segments_of(rollout) == [
        f"{SEE}«a1<|end|>»<|user|>o1<|end|><|assistant|>«a2<|end|>»",
        f"{SEE}a1{turn.format('o1')}a2{turn.format('o2')}«a3<|end|>»",
        f"{SEE}a2{turn.format('o2')}a3{turn.format('o3')}«a4<|end|>»",
    ]
    assert [turn.num_sampled for turn in rollout.turns] == [3, 3, 3, 3]


def test_summaries_of_an_opponent_are_not_part_of_the_rollout():
    engine, frozen = Engine(["a1", "a2"]), Engine(["theirs"])
    rollout, _ = play(
        engine, Game(["o1 is long"]), compact_at=25, summary_tokens=9, summariser="frozen", opponents={"frozen": frozen}
    )
    assert segments_of(rollout) == [
        f"{SEE}«a1<|end|>»",
        f"{SEE}theirs<|end|><|user|>o1 is long<|end|><|assistant|>«a2<|end|>»",
    ]
    assert TOKENIZER.decode(frozen.requests[0].token_ids.tolist()).endswith("<|user|>sum up<|end|><|assistant|>")
    assert not rollout.is_opponent


TEXT = st.text("ab", max_size=12)


@given(
    turns=st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=6),
    max_tokens=st.integers(55, 110),
    at=st.one_of(st.none(), st.integers(12, 60)),
    summary=st.integers(1, 9),
    summariser=st.sampled_from(["policy", "recent"]),
    split=st.booleans(),
)
@settings(deadline=None, max_examples=120)
def test_no_segment_is_longer_than_allowed_and_each_is_what_the_engine_consumed(
    turns, max_tokens, at, summary, summariser, split
):
    said = itertools.chain.from_iterable((f"s{turn}", f"s{note}") for turn, note, _ in turns)
    engine, game = Engine([*said, *["x"] * 9]), Game([f"o{answer}" for _, _, answer in turns])
    rollout, _ = play(
        engine, game, max_tokens=max_tokens, compact_at=at, summary_tokens=summary, summariser=summariser, split=split
    )
    lengths = rollout.segments or (len(rollout.tokens),)
    assert max(lengths) <= max_tokens
    assert sum(lengths) == len(rollout.tokens)
    assert rollout.loss_mask.sum() == engine.num_sampled == sum(turn.num_sampled for turn in rollout.turns)
    # Each completion is trained behind the tokens that it was sampled behind.
    rows = np.split(rollout.tokens, np.cumsum(lengths)[:-1])
    masks = np.split(rollout.loss_mask, np.cumsum(lengths)[:-1])
    contexts = [
        row[:place].tolist()
        for row, mask in zip(rows, masks, strict=True)
        for place in np.flatnonzero(np.diff(mask, prepend=0) == 1)
    ]
    assert contexts == [request.token_ids.tolist() for request in engine.requests]


def test_a_rollout_that_runs_again_finds_its_turns_and_its_summaries():
    said, answers = ["a1", "one", "a2", "two", "a3"], ["o1 is long", "o2 is long"]
    whole, client = play(Engine(said), Game(answers), compact_at=25, summary_tokens=9)
    for kept in range(6):
        completions = dict(itertools.islice(client.turns.completions.items(), kept))
        engine = Engine(said[kept:])
        again, _ = play(engine, Game(answers), compact_at=25, summary_tokens=9, earlier=RolloutTurns(completions))
        assert len(engine.requests) == 5 - kept
        assert segments_of(again) == segments_of(whole)


def test_a_prompt_without_room_and_arguments_without_sense_are_refused():
    with pytest.raises(ValueError, match="the prompt has 10 tokens, but conversations are compacted from 8 tokens"):
        play(Engine(["a1"]), Game(["o1"]), compact_at=8)
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}
    with pytest.raises(ValueError, match="the row has the field response_format"):
        play(Engine(["a1"]), Game([]), prompt=replace(PROMPT, info={"response_format": form}))
    assert argument_problem("compaction", {"compact_at": 0}) == "compact_at must be an int above 0, got 0"
    assert argument_problem("compaction", {"request": " "}).startswith("request must be a string")
    assert argument_problem("compaction", {"summariser": 3}).startswith("summariser must be a string")


def test_an_observation_that_does_not_fit_after_the_summary_ends_the_rollout():
    rollout, _ = play(Engine(["a1", "note"]), Game(["o" * 90, "never"]), compact_at=25, summary_tokens=9)
    assert segments_of(rollout) == [f"{SEE}«a1<|end|>»<|user|>sum up<|end|><|assistant|>«note<|end|>»"]
    assert (rollout.status, rollout.info) == ("truncated", {"compaction/count": 0.0})
