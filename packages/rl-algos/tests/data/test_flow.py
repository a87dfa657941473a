"""Datasets that are read as they come."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.data import examples
from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets, load_examples
from rl_algos.data.flow import Flow, FlowStream
from rl_algos.data.prompts import prompt_stream
from rl_algos.sft.config import SFTConfig
from rl_algos.sft.data import prepare_examples
from rl_core.errors import DataError


def flow(size, *, block=4, name="a", shuffle=True, make=lambda number, row: row, opened=None):
    def open_rows(skipped):
        if opened is not None:
            opened.append(skipped)
        return iter([f"{name}{number}" for number in range(skipped, size)])

    return Flow(name, open_rows, make, block=block, entropy=(7,), shuffle=shuffle)


@settings(deadline=None)
@given(size=st.integers(1, 20), block=st.integers(1, 7), shuffle=st.booleans())
def test_every_pass_has_every_row_once(size, block, shuffle):
    one = flow(size, block=block, shuffle=shuffle)
    rows = [f"a{number}" for number in range(size)]
    for number in range(3):
        drawn = [one.draw() for _ in range(size)]
        assert sorted(drawn) == sorted(rows)
        assert one.num_passes == number
        for start in range(0, size, block):
            assert sorted(drawn[start : start + block]) == sorted(rows[start : start + block])
    if not shuffle:
        assert drawn == rows


@settings(deadline=None)
@given(size=st.integers(1, 20), block=st.integers(1, 7), before=st.integers(0, 50))
def test_a_restored_flow_goes_on_with_the_same_rows(size, block, before):
    def usable(number, row):
        return None if number % 5 == 3 else row

    first = FlowStream([flow(size, block=block, make=usable), flow(9, name="b", block=block)], [2.0, 1.0])
    first.take(before)
    second = FlowStream([flow(size, block=block, make=usable), flow(9, name="b", block=block)], [2.0, 1.0])
    second.restore(json.loads(json.dumps(first.state())))
    assert second.num_drawn == before
    assert second.take(40) == first.take(40)


def test_a_restored_flow_skips_to_its_block():
    one = flow(20)
    for _ in range(11):
        one.draw()
    opened = []
    again = flow(20, opened=opened)
    again.restore(one.state())
    assert [again.draw() for _ in range(9)] == [one.draw() for _ in range(9)]
    assert opened == [8]


def test_weights_are_shares_of_draws():
    drawn = FlowStream([flow(9), flow(5, name="b")], [3.0, 1.0]).take(400)
    assert sum(row.startswith("a") for row in drawn) == 300


def test_rows_are_read_block_by_block():
    read = []

    def make(number, row):
        read.append(number)
        return row

    one = flow(1000, block=10, make=make)
    for _ in range(11):
        one.draw()
    assert len(read) == 20


def test_data_that_has_changed_is_refused():
    one = flow(20)
    for _ in range(19):
        one.draw()
    with pytest.raises(DataError, match="the block at row 16 has 0 items, but 3 were taken"):
        flow(10).restore(one.state())
    with pytest.raises(DataError, match=r"streamed was \['a'\] and is \['b'\]"):
        FlowStream([flow(5, name="b")]).restore(FlowStream([flow(5)]).state())


def test_a_pass_without_a_usable_row_is_refused():
    with pytest.raises(DataError, match="has no rows that can be used"):
        flow(5, make=lambda number, row: None).draw()


def test_an_end_or_a_mixture_without_weights_is_refused():
    with pytest.raises(DataError, match="remove max_num_epochs"):
        FlowStream([flow(5)], max_num_epochs=1)
    with pytest.raises(DataError, match="need a `weight` each"):
        FlowStream([flow(5), flow(5)])


class Streamed:
    """An `IterableDataset` of the hub's library, as far as it is used."""

    def __init__(self, rows, skipped=0):
        self.rows, self.skipped = rows, skipped

    def skip(self, count):
        return Streamed(self.rows, self.skipped + count)

    def __iter__(self):
        return iter(self.rows[self.skipped :])


@pytest.fixture
def streamed(monkeypatch):
    """Rows that `OWNER/NAME` streams."""
    rows = [{"question": f"{number}+1=", "reply": "x" * (number % 3 + 1)} for number in range(30)]

    def stream_rows(settings, purpose):
        opened = Streamed(rows)
        return lambda skipped: iter(opened.skip(skipped))

    monkeypatch.setattr(examples, "stream_rows", stream_rows)
    return rows


KEYS = {"dataset_name": "owner/name", "streaming": True, "shuffle_buffer": 8, "input_key": "question"}


def sft(tokenizer, data, **section):
    policy = SimpleNamespace(max_total_sequence_length=64, train_global_batch_size=4)
    config = SimpleNamespace(data=DataConfig.model_validate(data), sft=SFTConfig(**section), policy=policy)
    return prepare_examples(config, tokenizer, load_examples(config))


@pytest.mark.usefixtures("streamed")
def test_sft_learns_from_a_stream_and_goes_on(tokenizer):
    data = {"train": {**KEYS, "output_key": "reply"}}
    first = sft(tokenizer, data, max_num_steps=9).train
    assert first.num_batches(4) is None
    drawn = [row.id for row in first.take(40)]
    assert sorted(drawn[:30], key=lambda row_id: int(row_id.rpartition(":")[2])) == [
        f"owner/name:train:{number}" for number in range(30)
    ]
    assert first.epoch == 1
    assert [dataset[0].dataset for dataset in first.datasets] == ["owner/name"]
    second = sft(tokenizer, data, max_num_steps=9).train
    second.restore(json.loads(json.dumps(first.state())))
    assert [row.id for row in second.take(30)] == [row.id for row in first.take(30)]


def test_rows_that_cannot_be_used_are_left_out_or_end_the_run_when_they_come(tokenizer, streamed, caplog):
    streamed[20] = {"question": 3, "reply": "x"}
    streamed[25]["reply"] = "x" * 99
    data = {"train": {**KEYS, "output_key": "reply"}}
    with pytest.raises(DataError, match=r"owner/name \(train\), row 20 \(from 0\): expected .*data\.malformed: skip"):
        sft(tokenizer, data, max_num_steps=9).train.take(30)
    with pytest.raises(DataError, match=r"row 25 \(from 0\): it has \d+ tokens, more than 64; .*data\.overlong: skip"):
        sft(tokenizer, {**data, "malformed": "skip"}, max_num_steps=9).train.take(30)
    rows = sft(tokenizer, {**data, "malformed": "skip", "overlong": "skip"}, max_num_steps=9).train.take(28)
    assert len({row.id for row in rows}) == 28
    assert sum("1 excluded so far" in said for said in caplog.messages) == 2 + 1


@pytest.mark.usefixtures("streamed")
def test_prompts_come_from_a_stream(tokenizer):
    config = DataConfig.model_validate({"train": {**KEYS, "env_name": "math"}, "shuffle": False})
    stream = prompt_stream(load_datasets(config, "train"), config, tokenizer, max_tokens=32, seed=0)
    prompts = stream.take(31)
    assert [prompt.id for prompt in prompts] == [f"owner/name:train:{number % 30}" for number in range(31)]
    assert prompts[7].environment == "math"
    assert prompts[7].info["reply"] == "xx"


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(
    ("data", "section", "says"),
    [
        ({"train": KEYS}, {"max_num_epochs": 1}, "remove max_num_epochs"),
        ({"train": [KEYS, {"dataset_name": "arithmetic"}]}, {"max_num_steps": 1}, "`streaming` .*arithmetic"),
        ({"train": KEYS}, {"max_num_steps": 1, "mix_by": "tokens"}, "with sft.mix_by: rows"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(tokenizer, data, section, says):
    with pytest.raises(DataError, match=says):
        sft(tokenizer, data, **section)


def test_trees_of_messages_cannot_be_streamed():
    config = DataConfig.model_validate({"train": {"dataset_name": "OpenAssistant/oasst1", "streaming": True}})
    with pytest.raises(DataError, match=r"'OpenAssistant/oasst1' cannot be streamed.*`streaming`"):
        load_datasets(config, "train")


def test_proofs_are_no_prompts(tokenizer, streamed):
    streamed[:] = [{"problem": "a", "answer": "proof" if number % 2 else "2", "solution": "b"} for number in range(9)]
    keys = {"dataset_name": "owner/name", "streaming": True, "processor": "math_problem", "env_name": "math"}
    config = DataConfig.model_validate({"train": keys, "shuffle": False})
    stream = prompt_stream(load_datasets(config, "train"), config, tokenizer, max_tokens=32, seed=0)
    assert [int(prompt.id.rpartition(":")[2]) for prompt in stream.take(6)] == [0, 2, 4, 6, 8, 0]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train": {"data_path": "a.jsonl", "streaming": True}}, "train.streaming: .*`dataset_name`.*a.jsonl"),
        ({"train": {"data_path": "a"}, "validation": KEYS}, "validation.streaming: .*training"),
        ({"train": {**KEYS, "split_validation_size": 5}}, "train.split_validation_size: .*`streaming`"),
    ],
)
def test_a_stream_of_something_else_is_refused(data, says):
    with pytest.raises(ValueError, match=says):
        DataConfig.model_validate(data)


def test_the_library_streams_a_download(tmp_path, monkeypatch):
    import datasets

    snapshot = tmp_path / "hub" / "datasets--owner--name" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").write_text("".join(json.dumps({"messages": str(i)}) + "\n" for i in range(20)))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    config = DataConfig.model_validate({"train": {"dataset_name": "owner/name", "streaming": True}})
    [dataset] = load_datasets(config, "train")
    assert len(dataset.examples) == examples.SAMPLE
    assert [row["messages"] for row in dataset.source.open_rows(17)] == ["17", "18", "19"]
    assert [row["messages"] for row in dataset.source.open_rows(0)] == [str(number) for number in range(20)]
