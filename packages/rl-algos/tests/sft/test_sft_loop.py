from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.losses.nll import NLLLoss
from rl_algos.sft.config import SFTConfig
from rl_algos.sft.data import SFTData, TrainingRow, to_batch
from rl_algos.sft.loop import run as run_algorithm
from rl_algos.sft.loop import train
from rl_core.run import Components
from rl_core.testing.fakes import FakeModel, FakeRun


def rows(count, start=0):
    """Rows whose tokens are all their own number."""
    return [
        TrainingRow(f"r{i}", np.full(2 + i % 3, i, dtype=np.int32), np.array([0, 1, 1, 1][: 2 + i % 3], dtype=np.uint8))
        for i in range(start, start + count)
    ]


def data(epochs=None, validation=(), count=10):
    held_out = {"held-out": list(validation)} if validation else {}
    return SFTData(Stream([rows(count)], seed=1, max_num_epochs=epochs), held_out)


def loop(run, sft_data=None, *, batch_size=4, **settings):
    policy = FakeModel()
    train(SFTConfig(**settings), NLLLoss(), policy, sft_data or data(), run, batch_size=batch_size)
    return policy


def numbers(batch):
    return [int(row[0]) for row in batch.ragged("tokens")]


def trained(policy):
    return [numbers(batch) for name, batch in policy.calls if name == "train_step"]


def test_each_step_trains_the_next_rows_and_records_what_came_of_it():
    run = FakeRun()
    policy = loop(run, max_num_steps=3)
    order = [int(row.id[1:]) for row in data().train.take(12)]
    assert trained(policy) == [order[0:4], order[4:8], order[8:12]]
    assert run.phases == ["data", "training"] * 3
    assert list(run.metrics) == [1, 2, 3]
    assert run.metrics[2]["train/epoch"] == 0.8
    assert {"train/loss", "train/grad_norm", "train/lr", "train/num_tokens"} <= set(run.metrics[1])
    _, batch = policy.calls[0]
    lengths = [len(row) for row in batch.ragged("tokens")]
    assert run.metrics[1]["train/num_tokens"] == sum(lengths)
    assert batch.ragged("loss_mask").sums().tolist() == [length - 1 for length in lengths]


def test_epochs_bound_the_run_and_its_last_batch_is_what_is_left():
    policy = loop(FakeRun(), data(epochs=2), max_num_epochs=2)
    steps = trained(policy)
    assert [len(step) for step in steps] == [4, 4, 4, 4, 4]
    assert sorted(number for step in steps for number in step) == sorted([*range(10), *range(10)])
    assert [len(step) for step in trained(loop(FakeRun(), data(epochs=1)))] == [4, 4, 2]


def test_whichever_bound_comes_first_ends_the_run():
    assert len(trained(loop(FakeRun(), data(epochs=1), max_num_steps=2, max_num_epochs=1))) == 2
    assert len(trained(loop(FakeRun(), data(epochs=1), max_num_steps=9, max_num_epochs=1))) == 3


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"val_period": 2}, [2, 4]),
        ({"val_period": 2, "val_at_start": True, "val_at_end": True}, [0, 2, 4, 5]),
        ({"val_period": 5, "val_at_end": True}, [5]),
        ({"val_period": 0}, []),
    ],
)
def test_validation_is_held_when_it_is_due(settings, steps):
    run = FakeRun()
    policy = loop(run, data(validation=[to_batch(rows(3, 20))]), max_num_steps=5, **settings)
    assert [step for step, metrics in run.metrics.items() if "val/loss" in metrics] == steps
    assert [name for name, _ in policy.calls].count("evaluate") == len(steps)
    assert run.phases.count("validation") == len(steps)


def test_validation_before_the_first_step_sees_the_initial_weights_and_is_not_held_again_on_resume(tmp_path):
    validation = [to_batch(rows(3, 20))]
    first, second = FakeRun(tmp_path, end_after=2), FakeRun(tmp_path)
    for run in (first, second):
        loop(run, data(validation=validation), max_num_steps=4, val_at_start=True, val_period=0)
    assert first.metrics[0]["val/loss"] == validation[0].ragged("tokens").values.mean()
    assert 0 not in second.metrics


def test_the_validation_loss_is_the_mean_over_tokens_not_over_batches():
    validation = [to_batch(rows(5, 10)), to_batch(rows(1, 50))]
    run = FakeRun()
    loop(run, data(validation=validation), max_num_steps=1, val_period=0, val_at_start=True)
    tokens = [batch.ragged("loss_mask").values.sum() for batch in validation]
    losses = [batch.ragged("tokens").values.mean() for batch in validation]
    assert run.metrics[0]["val/loss"] == pytest.approx(np.average(losses, weights=tokens))
    assert run.metrics[0]["val/num_tokens"] == sum(tokens)


def test_each_of_several_datasets_has_a_validation_loss_of_its_own():
    parts = {"a.jsonl": [to_batch(rows(5, 10)), to_batch(rows(2, 30))], "b.jsonl": [to_batch(rows(1, 50))]}
    run = FakeRun()
    loop(run, replace(data(), validation=parts), max_num_steps=1, val_period=0, val_at_start=True)
    found = run.metrics[0]
    tokens = {name: [batch.ragged("loss_mask").values.sum() for batch in parts[name]] for name in parts}
    losses = {name: [batch.ragged("tokens").values.mean() for batch in parts[name]] for name in parts}
    for name in parts:
        assert found[f"val/{name}/loss"] == pytest.approx(np.average(losses[name], weights=tokens[name]))
    every = [[value for values in each.values() for value in values] for each in (losses, tokens)]
    assert found["val/loss"] == pytest.approx(np.average(every[0], weights=every[1]))
    assert found["val/num_tokens"] == sum(every[1])


def test_a_step_on_several_datasets_says_what_share_of_its_tokens_each_had():
    named = [[replace(row, dataset=name) for row in rows(6)] for name in ("a.jsonl", "b.jsonl")]
    run = FakeRun()
    policy = loop(run, SFTData(Stream(named, [3.0, 1.0], seed=1, shuffle=False), {}), max_num_steps=2, batch_size=4)
    assert trained(policy)[0] == [0, 1, 2, 0]  # three of the first dataset, one of the second
    assert run.metrics[1]["train/a.jsonl/share"] == pytest.approx(6 / 7)
    assert run.metrics[1]["train/b.jsonl/share"] == pytest.approx(1 / 7)
    assert not any(name.endswith("/share") for name in loop_metrics(data()))


def loop_metrics(sft_data):
    run = FakeRun()
    loop(run, sft_data, max_num_steps=1)
    return run.metrics[1]


def test_a_goal_in_validation_ends_the_run():
    # the fake model's loss falls as 1 / (1 + steps)
    validation = [to_batch(rows(3, 20))]
    goal = validation[0].ragged("tokens").values.mean() / 4
    run = FakeRun()
    loop(run, data(validation=validation), max_num_steps=9, val_period=1, stop_at_validation_loss=goal)
    assert sorted(run.metrics) == [1, 2, 3]
    assert "the goal was" in run.stop_reason


@pytest.mark.parametrize("end_after", [1, 2, 3])
def test_a_resumed_run_sees_the_same_batches_and_records_the_same_metrics(tmp_path, end_after):
    whole = FakeRun()
    expected = trained(loop(whole, max_num_steps=5))
    first, second = FakeRun(tmp_path, end_after=end_after), FakeRun(tmp_path)
    steps = trained(loop(first, max_num_steps=5)) + trained(loop(second, max_num_steps=5))
    assert steps == expected
    assert first.metrics | second.metrics == whole.metrics


def test_the_algorithm_is_run_as_configured():
    policy = FakeModel()
    config = SimpleNamespace(sft=SFTConfig(max_num_steps=2), policy=SimpleNamespace(train_global_batch_size=3))
    run_algorithm(config, Components(models={"policy": policy}, data=data()), FakeRun())
    assert [len(step) for step in trained(policy)] == [3, 3]
