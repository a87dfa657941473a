"""Spans of text that two tokenizers share, and what a teacher with other tokens says of them."""

from copy import deepcopy
from itertools import accumulate, pairwise

import numpy as np
import pytest
from byte_tokenizer import TEXTS, byte_level
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_algos.distillation.span_teacher import SpanTeacher, Translator, bytes_of, common_spans, whole_text
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.model import LOGPROBS
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.fakes import FakeModel


def cut(text, places):
    """A text in pieces that end at these bytes."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@given(st.binary(min_size=1, max_size=30), st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_spans_begin_and_end_where_tokens_of_both_do(text, places, other_places):
    ours, theirs = cut(text, places), cut(text, other_places)
    spans = common_spans(ours, theirs)
    shared = set(accumulate(map(len, ours))) & set(accumulate(map(len, theirs)))
    assert [sum(map(len, ours[: span.student[1]])) for span in spans] == sorted(shared)
    assert [number for span in spans for number in range(*span.student)] == list(range(len(ours)))
    assert [number for span in spans for number in range(*span.teacher)] == list(range(len(theirs)))
    for span in spans:
        assert b"".join(ours[slice(*span.student)]) == b"".join(theirs[slice(*span.teacher)])


def with_byte_fallback():
    characters = sorted(set("".join(TEXTS[:2])) - {" "})
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁t", "we", *characters]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make", [lambda: byte_level(300), with_byte_fallback], ids=["byte level", "byte fallback"])
def test_the_bytes_of_tokens_are_those_of_the_text(make):
    tokenizer = make()
    of = bytes_of(tokenizer, "policy")
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(map(of, ids)).decode() == text
    assert of(tokenizer.eos_token_id).decode() == tokenizer.eos_token


def test_a_tokenizer_of_characters_has_their_bytes(tokenizer):
    of = bytes_of(tokenizer, "policy")
    assert [of(number) for number in tokenizer("1+2", add_special_tokens=False)["input_ids"]] == [b"1", b"+", b"2"]


def test_a_tokenizer_whose_bytes_are_not_known_is_refused():
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"teacher: the bytes .* not known \(its decoder is WordPiece\)"):
        bytes_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "teacher")


def test_a_character_that_is_cut_in_two_is_left_out():
    assert whole_text(["né".encode()[:2], "né".encode()[2:]]) == ("né", 2)
    assert whole_text([b"a", "né".encode()[:2]]) == ("a", 1)
    assert whole_text(["é".encode()[:1]]) == ("", 0)


@pytest.fixture(scope="module")
def tokenizers_of_both():
    return byte_level(270), byte_level(340)


@pytest.mark.parametrize("text", TEXTS)
def test_a_response_is_heard_as_the_teachers_own_tokens_would_say_it(tokenizers_of_both, text):
    student, teacher = tokenizers_of_both
    translator = Translator(student, teacher, key="teacher")
    prompt = translator.prompt([{"role": "user", "content": "Say it."}])
    sampled = [*student(text, add_special_tokens=False)["input_ids"], student.eos_token_id]
    response = translator.response(prompt, sampled)
    whole = teacher(f"<|user|>Say it.<|end|><|assistant|>{text}<|end|>", add_special_tokens=False)["input_ids"]
    assert response.tokens.tolist() == whole
    assert [number for span in response.spans for number in range(*span.student)] == list(range(len(sampled)))
    assert [number for span in response.spans for number in range(*span.teacher)] == list(
        range(len(prompt), len(whole))
    )
    assert len(response.spans) > 4


def test_what_has_no_text_ends_the_spans(tokenizers_of_both):
    student, teacher = tokenizers_of_both
    translator = Translator(student, teacher, key="teacher")
    prompt = translator.prompt([{"role": "user", "content": "Say it."}])
    said = student("né", add_special_tokens=False)["input_ids"]
    cut_off = translator.response(prompt, said[:-1])
    assert [span.student for span in cut_off.spans] == [(0, 1)]
    assert translator.response(prompt, []).spans == []
    assert translator.response(prompt, [student.eos_token_id]).spans[0].student == (0, 1)


def test_a_turn_that_ends_by_the_template_ends_for_the_teacher_too(tokenizers_of_both):
    student, teacher = map(deepcopy, tokenizers_of_both)
    for each in (student, teacher):
        each.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
        each.chat_template = "{% for m in messages %}{{ m.content }}<|stop|>{% endfor %}"
    translator = Translator(student, teacher, key="teacher")
    for end in ("<|stop|>", student.eos_token):
        response = translator.response(np.array([], np.int32), [student.convert_tokens_to_ids(end)])
        assert response.tokens.tolist() == [teacher.convert_tokens_to_ids("<|stop|>")]
        assert [tuple(span) for span in response.spans] == [((0, 1), (0, 1))]


def rollout(prompt, sampled):
    mask = np.array([0] * len(prompt.token_ids) + [1] * len(sampled), np.uint8)
    return Rollout(
        prompt_id=prompt.id,
        tokens=np.concatenate([prompt.token_ids, sampled]).astype(np.int32),
        loss_mask=mask,
        generation_logprobs=mask.astype(np.float32),
        spans=(WeightSpan(1, len(sampled)),),
        turns=(Turn("", None, {"reward": 0.0}),),
        rewards={"reward": 0.0},
        stop_reason="stop",
    )


def test_the_teachers_logprob_of_a_span_is_at_its_last_token(tokenizers_of_both):
    student, teacher = tokenizers_of_both
    translator, model = Translator(student, teacher, key="teacher"), FakeModel()
    prompt = Prompt("p", ({"role": "user", "content": "Say it."},), np.array([5, 6], np.int32), "", {}, "said")
    responses = [[*student(text, add_special_tokens=False)["input_ids"], student.eos_token_id] for text in TEXTS[:2]]
    group = RolloutGroup.of(prompt, [rollout(prompt, sampled) for sampled in responses])
    batch = Batch({name: group.columns[name] for name in ("tokens", "loss_mask")})
    scorer = SpanTeacher(model, translator, max_tokens=1000, temperature=1.0)
    found = scorer.scored(batch, [group])
    for row, sampled in enumerate(responses):
        heard = translator.response(translator.prompt(prompt.messages), sampled)
        rows = Batch({"tokens": Ragged.from_rows([heard.tokens], np.int32)})
        logprobs = FakeModel().infer(rows, [LOGPROBS]).ragged("logprobs").values
        expected = np.zeros(len(sampled), np.float32)
        for span in heard.spans:
            expected[span.student[1] - 1] = logprobs[slice(*span.teacher)].sum()
        np.testing.assert_allclose(found.ragged("span_logprobs")[row], [0, 0, *expected], rtol=1e-6)
        marks = found.ragged("spans")[row]
        assert marks[:2].tolist() == [0, 0]
        assert np.flatnonzero(marks == 2).tolist() == [span.student[1] + 1 for span in heard.spans]
        assert (marks[2:] > 0).all()
    forced = batch.ragged("loss_mask").values.copy()
    forced[[4, 5]] = 0
    forced_batch = batch.with_columns({"loss_mask": batch.ragged("loss_mask").like(forced)})
    without = scorer.scored(forced_batch, [group])
    # The teacher reads tokens that ended thoughts by force, but they are in no span that counts.
    heard = translator.response(translator.prompt(prompt.messages), responses[0])
    kept = [span for span in heard.spans if not {2, 3} & set(range(*span.student))]
    assert 0 < len(kept) < len(heard.spans)
    ends = [span.student[1] + 1 for span in kept]
    assert np.flatnonzero(without.ragged("spans")[0] == 2).tolist() == ends
    assert without.ragged("span_logprobs")[0][ends].tolist() == found.ragged("span_logprobs")[0][ends].tolist()
    too_long = SpanTeacher(model, translator, max_tokens=5, temperature=1.0).scored(batch, [group])
    assert not too_long.ragged("spans").values.any()
