import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_examples
from rl_algos.sft.config import SFTConfig
from rl_algos.sft.data import prepare_examples, to_batch
from rl_core.errors import DataError

SUMS = {"dataset_name": "arithmetic", "settings": {"max_operand": 9}}


def prepared(tokenizer, data, *, batch_size=32, max_tokens=64, **sft):
    policy = SimpleNamespace(max_total_sequence_length=max_tokens, train_global_batch_size=batch_size)
    config = SimpleNamespace(data=DataConfig.model_validate(data), sft=SFTConfig(**sft), policy=policy)
    return prepare_examples(config, tokenizer, load_examples(config))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def under_loss(tokenizer, row):
    return tokenizer.decode(row.tokens[row.loss_mask == 1])


def test_generated_sums_are_learned_with_their_answers(tokenizer):
    data = prepared(tokenizer, {"train": SUMS, "validation": SUMS})
    rows = data.train.take(data.train.num_items)
    assert data.train.num_left == 0
    for row in rows:
        question, answer = tokenizer.decode(row.tokens, skip_special_tokens=True).split("=")
        a, b = question.split("+")
        assert int(a) + int(b) == int(answer)
        assert under_loss(tokenizer, row) == f"{answer}<|end|>"
    assert len(rows) + sum(len(batch) for batch in data.validation["arithmetic"]) == 100


def test_conversations_pairs_and_processors_give_rows(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pair = {"question": "q", "reply": 3}
    passage = {"question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"]}}
    data = prepared(
        tokenizer,
        {
            "train": [
                {"data_path": write(tmp_path / "a.jsonl", [{"messages": turns}])},
                {"data_path": write(tmp_path / "b.jsonl", [pair]), "input_key": "question", "output_key": "reply"},
                {"data_path": write(tmp_path / "c.jsonl", [passage]), "processor": "squad"},
            ]
        },
    )
    rows = {row.id: under_loss(tokenizer, row) for row in data.train.take(3)}
    assert rows == {"a.jsonl:train:0": "b<|end|>", "b.jsonl:train:0": "3<|end|>", "c.jsonl:train:0": "Ada<|end|>"}


def test_validation_is_cut_into_batches(tokenizer):
    data = {"train": SUMS, "validation": {**SUMS, "split": "train", "settings": {"max_operand": 9, "num_rows": 10}}}
    assert [len(batch) for batch in prepared(tokenizer, data, batch_size=4).validation["arithmetic"]] == [4, 4, 2]
    batches = prepared(tokenizer, data, val_global_batch_size=6).validation["arithmetic"]
    assert [len(batch) for batch in batches] == [6, 4]
    batches = prepared(tokenizer, data, batch_size=4, val_batches=2).validation["arithmetic"]
    assert [len(batch) for batch in batches] == [4, 4]


def test_rows_become_the_columns_of_the_loss(tokenizer):
    batch = to_batch(prepared(tokenizer, {"train": SUMS}).train.take(3))
    assert len(batch) == 3
    assert batch.ragged("tokens").values.dtype == np.int32
    assert batch.ragged("loss_mask").values.dtype == np.uint8


def test_overlong_rows_are_refused_or_left_out(tmp_path, tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * size}]}
        for size in (1, 90)
    ]
    data = {"train": {"data_path": write(tmp_path / "a.jsonl", rows)}}
    says = r"1 of 2 rows have more than 64 tokens; the longest \(.*a\.jsonl, line 2\) has 95"
    with pytest.raises(DataError, match=says):
        prepared(tokenizer, data)
    assert prepared(tokenizer, {**data, "overlong": "skip"}).train.num_items == 1


def test_rows_with_nothing_to_learn_are_refused(tmp_path, tokenizer):
    silent = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the conversation has no assistant message"):
        prepared(tokenizer, {"train": {"data_path": write(tmp_path / "a.jsonl", [silent])}})


def written_mixture(tmp_path, lengths=(2, 6, 20), num_rows=40):
    """A file for each length of what the assistant says."""
    data = []
    for number, (length, weight) in enumerate(zip(lengths, (5, 3, 2), strict=True)):
        sizes = np.random.default_rng(number).integers(length // 2, length * 3 // 2 + 1, num_rows)
        rows = [{"prompt": f"{index}?", "completion": "x" * int(size)} for index, size in enumerate(sizes)]
        path = write(tmp_path / f"{length}.jsonl", rows)
        data.append({"data_path": path, "input_key": "prompt", "output_key": "completion", "weight": weight})
    return data


def shares(rows, of=lambda row: 1):
    counts = Counter()
    for row in rows:
        counts[row.dataset] += of(row)
    return [counts[f"{length}.jsonl"] / counts.total() for length in (2, 6, 20)]


def test_weights_are_shares_of_rows_or_of_tokens_that_are_learned(tmp_path, tokenizer):
    mixture = {"train": written_mixture(tmp_path)}
    by_rows = prepared(tokenizer, mixture).train.take(100)
    assert shares(by_rows) == [0.5, 0.3, 0.2]
    by_tokens = prepared(tokenizer, mixture, mix_by="tokens").train.take(3000)
    assert shares(by_tokens, lambda row: int(row.loss_mask.sum())) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert shares(by_tokens)[0] > 0.6  # more of the short rows


def test_a_schedule_of_weights_is_of_tokens_as_well(tmp_path, tokenizer):
    mixture = written_mixture(tmp_path)
    for each, at_end in zip(mixture, (2, 3, 5), strict=True):
        each["weight"] = [{"step": 1, "weight": each["weight"]}, {"step": 5, "weight": at_end}]
    stream = prepared(tokenizer, {"train": mixture}, mix_by="tokens", max_num_epochs=200).train
    for step, expected in ((1, [0.5, 0.3, 0.2]), (3, [0.35, 0.3, 0.35]), (9, [0.2, 0.3, 0.5])):
        stream.begin(step)
        taken = shares(stream.take(1000), lambda row: int(row.loss_mask.sum()))
        assert taken == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("mix_by", ["rows", "tokens"])
def test_a_mixture_goes_on_in_the_midst_of_an_epoch_with_the_same_rows(tmp_path, tokenizer, mix_by):
    mixture = {"train": written_mixture(tmp_path)}
    whole = [row.id for row in prepared(tokenizer, mixture, mix_by=mix_by).train.take(300)]
    first, second = (prepared(tokenizer, mixture, mix_by=mix_by).train for _ in range(2))
    drawn = [row.id for row in first.take(77)]
    second.restore(json.loads(json.dumps(first.state())))
    assert drawn + [row.id for row in second.take(223)] == whole


def test_each_dataset_is_validated_apart(tmp_path, tokenizer):
    data = prepared(tokenizer, {"train": SUMS, "validation": written_mixture(tmp_path)}, batch_size=30, val_batches=1)
    sizes = {name: [len(batch) for batch in batches] for name, batches in data.validation.items()}
    assert sizes == {"2.jsonl": [30], "6.jsonl": [30], "20.jsonl": [30]}


def test_a_completion_may_be_messages_and_turns_may_be_chosen(tmp_path, tokenizer):
    turns = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"))]
    row = {"prompt": [*turns, {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}
    data = {
        "train": {"data_path": write(tmp_path / "a.jsonl", [row]), "input_key": "prompt", "output_key": "completion"}
    }
    (both,) = prepared(tokenizer, data).train.take(1)
    assert under_loss(tokenizer, both) == "b<|end|>d<|end|>"
    (last,) = prepared(tokenizer, data, learn="last").train.take(1)
    assert under_loss(tokenizer, last) == "d<|end|>"


@pytest.mark.parametrize(("said", "num_warned"), [("日本", 1), ("12", 0)])
def test_characters_to_learn_that_the_tokenizer_does_not_know_are_warned_of(
    tokenizer, tmp_path, caplog, said, num_warned
):
    lines = [{"messages": [user("1+1="), assistant(answer)]} for answer in ("2", said)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    prepared(tokenizer, {"train": {"data_path": str(path)}}, batch_size=2)
    found = [each for each in caplog.messages if "the tokenizer does not know" in each]
    assert len(found) == num_warned
    assert all(each.startswith("1 of 2 rows") and "line 2" in each and "<|unknown|>" in each for each in found)


@pytest.mark.parametrize("more", [{}, {"id": 3, "source": "web"}])
def test_columns_that_are_not_used_are_logged_once(tokenizer, tmp_path, caplog, more):
    rows = [{"system": "0", "messages": [user("1+1="), assistant("2")], "tools": None, **more}] * 2
    with caplog.at_level("INFO"):
        prepared(tokenizer, {"train": {"data_path": write(tmp_path / "a.jsonl", rows)}}, batch_size=2)
    found = [each for each in caplog.messages if "not used" in each]
    assert found == (["a.jsonl: not used: the columns id, source"] if more else [])


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_a_run_of_few_steps_is_warned_of(tokenizer, caplog):
    prepared(tokenizer, {"train": SUMS})
    [message] = caplog.messages
    assert "only 3 steps: 95 rows in steps of 32 (policy.train_global_batch_size)" in message
