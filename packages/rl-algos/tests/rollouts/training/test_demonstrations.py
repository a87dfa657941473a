"""Demonstrations in a batch: their mark, their place among the minibatches, and what does not count them."""

import dataclasses

import numpy as np
import pytest
from rollouts_builder import make_prompt, make_rollout, make_split_rollout

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.grpo.config import GRPOConfig
from rl_algos.losses.mask import DEMONSTRATION, without_demonstrations
from rl_algos.rollouts.training.batch import build_batch, passes, with_advantages
from rl_algos.rollouts.training.demonstrations import DemonstrationRows
from rl_algos.rollouts.training.metrics import rollout_metrics
from rl_algos.rollouts.training.segments import ROLLOUT
from rl_core.data.batch import Batch, RemoteColumn, RemoteRows
from rl_core.data.ragged import Ragged
from rl_core.errors import DataChanged
from rl_core.images import IMAGES
from rl_core.rollouts.group import RolloutGroup

SHARE = GRPOConfig(demonstrations={"share": 0.25})


def make_group(id: str) -> RolloutGroup:
    """Two rollouts, the second of two segments, and a long demonstration of another reward."""
    prompt = make_prompt(id)
    shown = dataclasses.replace(make_rollout(prompt, 1.0, (7,) * 9), is_demonstration=True)
    return RolloutGroup.of(prompt, [make_rollout(prompt, 0.0), make_split_rollout(prompt, 0.5, (7,), (8, 9)), shown])


def test_rows_of_demonstrations_have_a_mark_and_their_own_mask():
    groups = [make_group("a"), make_group("b")]
    batch = build_batch(groups, SHARE.model_copy(update={"rewritten_history": "split"}))
    assert batch.array(DEMONSTRATION).tolist() == [0, 0, 0, 1] * 2
    assert batch.ragged("loss_mask").sums().tolist() == [2, 1, 2, 9] * 2
    assert without_demonstrations(batch).ragged("loss_mask").sums().tolist() == [2, 1, 2, 0] * 2
    plain = build_batch([dataclasses.replace(group, columns=group.sampled.columns, rollouts=group.sampled.rollouts)
                         for group in groups], GRPOConfig(rewritten_history="split"))  # fmt: skip
    assert DEMONSTRATION not in plain
    assert without_demonstrations(plain) is plain


def test_metrics_of_rollouts_leave_demonstrations_out():
    groups = [make_group("a"), make_group("b")]
    metrics = rollout_metrics(groups, np.zeros(6))
    assert metrics == rollout_metrics([group.sampled for group in groups], np.zeros(6))
    assert (metrics["reward/mean"], metrics["rollout/max_length"]) == (0.25, 3.0)
    assert groups[0].sampled.columns.ragged("tokens").lengths.tolist() == [5, 4, 6]


@dataclasses.dataclass(frozen=True, eq=False)
class Shelf:
    """Columns that are stored elsewhere."""

    columns: Batch

    def fetch(self):
        raise AssertionError("a step does not fetch the columns of rollouts")


def make_rows(count: int) -> Batch:
    tokens = Ragged.from_rows([np.full(3 + number, 50 + number) for number in range(count)], np.int32)
    mask = tokens.like((np.arange(len(tokens.values)) % 2).astype(np.uint8))
    return Batch({"tokens": tokens, "loss_mask": mask, DEMONSTRATION: np.ones(count, np.uint8)})


def with_all_columns(groups) -> Batch:
    batch = with_advantages(build_batch(groups, SHARE), np.arange(3.0 * len(groups)))
    return batch.with_columns({"prev_logprobs": batch.ragged("generation_logprobs")})


def marked(batch: Batch, mark: int = 1) -> Batch:
    return batch.select(np.flatnonzero(batch.array(DEMONSTRATION) == mark))


@pytest.mark.parametrize("count", [1, 2])
def test_every_demonstration_is_in_one_minibatch_of_each_pass_beside_the_rollouts(count):
    prompt = make_prompt()
    groups = [RolloutGroup.of(prompt, [make_rollout(prompt, reward) for reward in (0, 1, 2)]) for _ in range(3)]
    batch, rows = with_all_columns(groups), make_rows(5)
    without = list(passes(batch, 2, count=count, seed=(1, 2)))
    parts = list(passes(batch, 2, count=count, seed=(1, 2), demonstrations=rows))
    assert len(parts) == len(without) == 5 * count
    for each in (parts[:5], parts[5:]) if count == 2 else (parts,):
        shown = [row.tolist() for part in each for row in marked(part).ragged("tokens")]
        assert shown == [row.tolist() for row in rows.ragged("tokens")]
    for part, plain in zip(parts, without, strict=True):
        assert sorted(part) == sorted(plain)
        for name in plain:
            kept, expected = marked(part, 0)[name], plain[name]
            assert kept.equals(expected) if isinstance(kept, Ragged) else np.array_equal(kept, expected)
        added = marked(part)
        assert not added.array("advantages").any()
        assert not added.ragged("prev_logprobs").values.any()
        assert added.ragged("loss_mask").sums().any()


def test_columns_of_rollouts_stay_where_they_are():
    prompt = make_prompt()
    groups = [RolloutGroup.of(prompt, [make_rollout(prompt, reward) for reward in (0, 1, 2)])]
    batch = with_all_columns(groups)
    names = ["tokens", "loss_mask", "generation_logprobs"]
    stored = RemoteRows.of(Shelf(batch.only(names)), batch.lengths)
    elsewhere = {**stored.columns(names), "prev_logprobs": RemoteColumn(stored, "logprobs")}
    [part] = passes(batch.with_columns(elsewhere), 3, count=1, seed=(0,), demonstrations=make_rows(2))
    for name in elsewhere:
        assert isinstance(part.columns[name], RemoteColumn)
    added = part.select(np.arange(3, 5)).local()
    assert added.ragged("tokens").equals(make_rows(2).ragged("tokens"))
    assert added.ragged("loss_mask").equals(make_rows(2).ragged("loss_mask"))
    assert added.ragged("prev_logprobs").values.dtype == np.float32


def test_demonstrations_are_sequences_of_their_own_with_routing_and_images():
    groups = [make_group("a")]
    batch = with_advantages(build_batch(groups, SHARE.model_copy(update={"rewritten_history": "split"})), np.zeros(3))
    routed = batch.ragged("tokens").like(np.ones((len(batch.ragged("tokens").values), 3, 2), np.int16))
    rows = make_rows(2).with_columns({IMAGES: Ragged.from_rows([np.ones((1, 16)), np.ones((0, 16))], np.uint8, (16,))})
    [part] = passes(batch.with_columns({"routed_experts": routed}), 3, count=1, seed=(0,), demonstrations=rows)
    assert part.array(ROLLOUT).tolist() == [0, 1, 1, 2, 3, 4]
    assert part.ragged(IMAGES).lengths.tolist() == [0, 0, 0, 0, 1, 0]
    assert [set(row.flatten()) for row in part.ragged("routed_experts")] == [{1}] * 4 + [{-1}] * 2


def read(path, tokenizer, *, seed=3) -> DemonstrationRows:
    data = DataConfig(train=DatasetConfig(data_path="unused"))
    dataset = DatasetConfig(data_path=str(path), input_key="q", output_key="a")
    return DemonstrationRows.of(dataset, data, tokenizer, rows=3, max_tokens=40, seed=seed)


def test_a_dataset_is_read_as_supervised_fine_tuning_reads_it_and_goes_on_from_its_position(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"q": "{n}+{n}=", "a": "{2 * n}"}}\n' for n in range(7)))
    rows = read(path, tokenizer)
    taken = [rows.take() for _ in range(5)]
    shown = [tokenizer.decode(row) for batch in taken for row in batch.ragged("tokens")]
    assert sorted(shown[:7]) == sorted(f"<|user|>{n}+{n}=<|end|><|assistant|>{2 * n}<|end|>" for n in range(7))
    assert set(shown[7:14]) == set(shown[:7])
    assert all(batch.array(DEMONSTRATION).tolist() == [1, 1, 1] for batch in taken)
    first = taken[0]
    learned = first.ragged("tokens").values[first.ragged("loss_mask").values > 0]
    assert tokenizer.decode(learned).count("<|end|>") == 3
    assert "+" not in tokenizer.decode(learned)

    again = read(path, tokenizer)
    again.take()
    position = again.stream.state()
    resumed = read(path, tokenizer)
    resumed.stream.check(position)
    resumed.stream.restore(position)
    for expected in taken[1:]:
        assert resumed.take().ragged("tokens").equals(expected.ragged("tokens"))
    path.write_text(path.read_text().replace("12", "13"))
    with pytest.raises(DataChanged):
        read(path, tokenizer).stream.check(position)
