"""Rollouts whose thoughts end within a budget: their tokens, masks and turns, and what is learned from them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_tokenizers import tokenizer_of

from rl_algos.losses.policy import PolicyLoss
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_algos.rollouts.training.metrics import rollout_metrics
from rl_algos.rollouts.training.turns import turns_of_rollouts
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.client import PlayClient, PlayServices
from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_algos.rollouts.worker.written import make_tokenizer
from rl_algos.tokenizer import encode_prompt
from rl_algos.torch.policy_loss import compute
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams, ThinkingBudget
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, Thinking, WeightSpan
from rl_core.rollouts.thoughts import closing_text, final_text
from rl_core.torch.loss import Rows

TOKENIZER = tokenizer_of("qwen3")
ASKED = ({"role": "user", "content": "6 * 7?"},)
PROMPT = Prompt("p0", ASKED, encode_prompt(TOKENIZER, list(ASKED)), "game")
BUDGET, FORCED = 6, "\n</think>\n\n"
STOP = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


class Thinker:
    """Thinks without an end in the first turn and briefly in later ones, then answers; each token follows from those
    before it. `cuts` interrupt its answers after so many tokens."""

    def __init__(self, cuts=()):
        self.cuts = list(cuts)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        row = request.token_ids.tolist()
        new, reason = [], "length"
        while len(new) < request.sampling.max_new_tokens:
            if len(new) == cut:
                reason = "abort"
                break
            new.append(self._next(TOKENIZER.decode([*row, *new])))
            if new[-1] == STOP:
                reason = "stop"
                break
        spans = (WeightSpan(1, len(new)),) if new else ()
        return Completion(np.array(new, np.int32), np.full(len(new), -0.5, np.float32), reason, spans)

    def _next(self, text):
        *before, said = text.split("<|im_start|>assistant\n")
        script = "<think>Hm</think>42" if len(before) > 1 else "<think>" + "Hm, " * 20
        if "</think>" in said and len(before) == 1:
            script = said[: said.index("</think>")] + FORCED.lstrip("\n") + "41"
        rest = script.removeprefix(said)
        return ids(rest)[0] if (rest and rest != script) or not said else STOP


class Game:
    def __init__(self):
        self.seen = []

    async def step(self, conversation):
        self.seen.append(conversation)
        if conversation.final_text == "42":
            return StepResult(1.0)
        return StepResult(0.0, done=False, observation=({"role": "user", "content": "no"},))

    async def abandon(self, conversation_ids):
        pass


def play(engine=None, *, closes=True, limit=60, earlier=None, text="", game=None):
    services = PlayServices(engine or Thinker(), Chat(TOKENIZER), {"game": game or Game()}, max_steps=1)
    sampling = SamplingParams(limit, stop_token_ids=(STOP,), thinking=ThinkingBudget(BUDGET, closes=closes, text=text))
    client = PlayClient(services, PROMPT, sampling, 5, earlier or RolloutTurns(), {})
    rollout = asyncio.run(MultiTurnProgram(max_turns=3, max_tokens=200).run(PROMPT, client))
    return rollout, client


def shown(rollout, mask):
    return TOKENIZER.decode(rollout.tokens[rollout.loss_mask == mask].tolist())


def test_forced_tokens_are_part_of_the_turn_and_not_of_what_is_learned():
    game = Game()
    rollout, _ = play(game=game)
    begin = len(PROMPT.token_ids)
    first = ids("<think>Hm, H" + FORCED + "41<|im_end|>")
    assert rollout.tokens[begin : begin + len(first)].tolist() == first
    assert rollout.loss_mask[begin : begin + len(first)].tolist() == [1] * 6 + [0] * len(ids(FORCED)) + [1] * 3
    assert rollout.generation_logprobs.tolist() == (-0.5 * rollout.loss_mask).tolist()
    assert shown(rollout, 1) == "<think>Hm, H41<|im_end|><think>Hm</think>42<|im_end|>"
    assert [conversation.final_text for conversation in game.seen] == ["41", "42"]
    assert [turn.num_sampled for turn in rollout.turns] == [9, 7]
    assert (rollout.num_sampled, rollout.status, rollout.reward) == (16, "ok", 1.0)
    assert rollout.info == {"thinking/tokens": 6 + 4, "thinking/cut": 1.0}
    assert rollout.turns[0].text == "<think>Hm, H" + FORCED + "41"


def test_thoughts_may_be_closed_by_other_words():
    rollout, _ = play(text=" Enough.\n</think>\n\n")
    assert " Enough.\n</think>" in shown(rollout, 0)
    assert rollout.turns[0].text == "<think>Hm, H Enough.\n</think>\n\n41"


def test_a_rollout_that_is_truncated_ends_with_its_thoughts():
    rollout, _ = play(closes=False)
    assert (rollout.status, rollout.stop_reason, len(rollout.turns)) == ("truncated", "length", 1)
    assert shown(rollout, 1) == "<think>Hm, H"
    assert rollout.info == {"thinking/tokens": 6.0, "thinking/cut": 1.0}


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("cuts", [[2, 0, 4, 1, 2], [6], [6, 0], [7, 5, 1], [0, 1, 1, 1, 1, 1, 1, 0, 1, 1]])
def test_interrupted_rollouts_close_their_thoughts_at_the_same_token(cuts, closes):
    expected, _ = play(closes=closes)
    rollout, _ = play(Thinker(cuts), closes=closes)
    for name in ("tokens", "loss_mask", "generation_logprobs"):
        assert getattr(rollout, name).tolist() == getattr(expected, name).tolist()
    assert (rollout.info, rollout.spans, rollout.status) == (expected.info, expected.spans, expected.status)


def test_a_rollout_that_runs_again_goes_on_after_the_turn_that_was_closed():
    expected, client = play()
    first = dict([next(iter(client.turns.completions.items()))])
    assert next(iter(first.values())).thinking == Thinking(BUDGET, len(ids(FORCED)), is_cut=True)
    engine = Thinker()
    rollout, _ = play(engine, earlier=RolloutTurns(first))
    assert len(engine.requests) == 2
    assert rollout.tokens.tolist() == expected.tokens.tolist()
    assert rollout.loss_mask.tolist() == expected.loss_mask.tolist()
    assert (rollout.info, rollout.spans) == (expected.info, expected.spans)


def test_metrics_have_the_tokens_of_thoughts_and_the_share_that_were_cut():
    cut, _ = play()
    free = replace(cut, info={"thinking/tokens": 4.0, "thinking/cut": 0.0})
    metrics = rollout_metrics([RolloutGroup.of(PROMPT, [cut, free])])
    assert metrics["rollout/thinking/tokens"] == 7
    assert metrics["rollout/thinking/cut"] == 0.5
    assert metrics["rollout/mean_length"] == 16


def test_turns_have_the_sampled_tokens_only():
    rollout, _ = play()
    assert turns_of_rollouts([RolloutGroup.of(PROMPT, [rollout])]).lengths.values.tolist() == [9, 7]


def test_no_gradient_and_no_metric_depends_on_forced_tokens():
    rollout, _ = play()
    group = RolloutGroup.of(PROMPT, [rollout])
    batch = with_advantages(build_batch([group], RolloutConfig()), np.array([0.7]))
    mask = batch.ragged("loss_mask")
    begin = len(PROMPT.token_ids) + BUDGET
    forced = np.arange(begin, begin + len(ids(FORCED)))
    random = np.random.default_rng(0)
    drawn = {name: random.normal(-1, 0.3, len(mask.values)) for name in ("logprobs", "prev_logprobs")}
    found = []
    for nudge in (0.0, -3.0):
        columns = {name: torch.from_numpy(getattr(batch[name], "values", batch[name])) for name in batch}
        for name, values in drawn.items():
            columns[name] = torch.from_numpy(values.copy())
            columns[name][forced] += nudge
        logprobs = columns.pop("logprobs").requires_grad_()
        rows = Rows(torch.from_numpy(mask.offsets), columns)
        sums = compute(PolicyLoss(), {"logprobs": logprobs}, rows)
        sum(sums.objective.values()).backward()
        assert logprobs.grad.dtype == torch.float64
        assert (logprobs.grad[forced] == 0).all()
        assert (logprobs.grad[mask.values > 0] != 0).any()
        found.append((logprobs.grad.tolist(), {name: float(metric.value) for name, metric in sums.metrics.items()}))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "opened", "stop"),
    [("qwen3", "<think>", "<|im_end|>"), ("gpt_oss", "<|channel|>analysis<|message|>", "<|return|>")],
)
def test_a_turn_whose_thoughts_were_closed_is_read_as_its_answer(family, opened, stop):
    chat = Chat(tokenizer_of(family))
    thoughts, prompt = chat.encoded(f"{opened}Hm"), chat.encoded("x")
    assert chat.thoughts(prompt, thoughts) == (len(thoughts), opened)
    closed = np.concatenate([thoughts, chat.encoded(closing_text(opened))])
    assert chat.thoughts(prompt, closed)[1] == ""
    text = chat.read(np.concatenate([closed, chat.encoded(f"42{stop}")])).text
    assert final_text(text) == "42"


BYTES = make_tokenizer()


@pytest.mark.parametrize(
    ("tokenizer", "mark", "end"),
    [
        (TOKENIZER, "<think>", "</think>"),
        (TOKENIZER, "[THINK]", "[/THINK]"),
        (BYTES, "<think>", "</think>"),
        (BYTES, "◁think▷", "◁/think▷"),
    ],
    ids=["tokens", "characters", "bytes", "parts of characters"],
)
def test_tokens_of_thoughts_are_counted_whatever_their_marks_are_made_of(tokenizer, mark, end):
    chat = Chat(tokenizer)

    def tokens(text):
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    prompt, opened = tokens("x"), tokens(f"x{mark}\n")
    assert chat.thoughts(prompt, tokens(f"{mark}é{end}42")) == (len(tokens(f"{mark}é{end}")), "")
    assert chat.thoughts(prompt, tokens(f"{mark}abc")) == (len(tokens(f"{mark}abc")), mark)
    assert chat.thoughts(opened, tokens("abc")) == (3, mark)
    assert chat.thoughts(opened, tokens(f"a{end}b")) == (1 + len(tokens(end)), "")
    assert chat.thoughts(prompt, tokens("abc")) == (0, "")
