import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.losses.tokens import NLLLoss
from rl_algos.sft.data import TrainingRow, to_batch
from rl_algos.supervised.config import SupervisedConfig
from rl_algos.supervised.data import SupervisedData
from rl_algos.supervised.loop import RowObjective, train
from rl_core.model import LOGPROBS
from rl_core.testing.fakes import FakeModel, FakeRun


def rows(count, start=0):
    """Rows whose tokens are all their own number."""
    return [
        TrainingRow(f"r{i}", np.full(2 + i % 3, i, dtype=np.int32), np.array([0, 1, 1, 1][: 2 + i % 3], dtype=np.uint8))
        for i in range(start, start + count)
    ]


def data(epochs=None, validation=(), count=10):
    held_out = validation if isinstance(validation, dict) else {"held out": list(validation)} if validation else {}
    return SupervisedData(Stream([rows(count)], seed=1, max_num_epochs=epochs), held_out)


def loop(run, given=None, *, batch_size=4, complete=None, scores=None, **settings):
    policy = FakeModel()
    objective = RowObjective(NLLLoss(), to_batch, complete)
    train(SupervisedConfig(**settings), objective, policy, given or data(), run, batch_size=batch_size, scores=scores)
    return policy


def numbers(batch):
    return [int(row[0]) for row in batch.ragged("tokens")]


def mean_token(rows):
    return np.concatenate([row.tokens for row in rows]).mean()


def num_learned(rows):
    return sum(int(row.loss_mask.sum()) for row in rows)


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
    policy = loop(run, data(validation=[rows(3, 20)]), max_num_steps=5, **settings)
    assert [step for step, metrics in run.metrics.items() if "val/loss" in metrics] == steps
    assert [name for name, _ in policy.calls].count("evaluate") == len(steps)
    assert run.phases.count("validation") == len(steps)


def test_validation_before_the_first_step_sees_the_initial_weights_and_is_not_held_again_on_resume(tmp_path):
    validation = [rows(3, 20)]
    first, second = FakeRun(tmp_path, end_after=2), FakeRun(tmp_path)
    for run in (first, second):
        loop(run, data(validation=validation), max_num_steps=4, val_at_start=True, val_period=0)
    assert first.metrics[0]["val/loss"] == mean_token(validation[0])
    assert 0 not in second.metrics


def test_tasks_are_scored_before_the_first_step_and_after_each(tmp_path):
    scored = []
    loop(FakeRun(), max_num_steps=3, scores=scored.append)
    assert scored == [0, 1, 2, 3]
    loop(FakeRun(tmp_path, end_after=2), max_num_steps=4)
    resumed = []
    loop(FakeRun(tmp_path), max_num_steps=4, scores=resumed.append)
    assert resumed == [3, 4]


def test_the_validation_loss_is_the_mean_over_tokens_not_over_batches():
    validation = [rows(5, 10), rows(1, 50)]
    run = FakeRun()
    loop(run, data(validation=validation), max_num_steps=1, val_period=0, val_at_start=True)
    tokens, losses = [num_learned(batch) for batch in validation], [mean_token(batch) for batch in validation]
    assert run.metrics[0]["val/loss"] == pytest.approx(np.average(losses, weights=tokens))
    assert run.metrics[0]["val/num_tokens"] == sum(tokens)


def test_several_validation_datasets_are_reported_apart_and_together():
    validation = {"short": [rows(2, 10), rows(1, 30)], "long": [rows(7, 40)]}
    run = FakeRun()
    loop(run, data(validation=validation), max_num_steps=1, val_period=0, val_at_start=True)
    tokens = {name: sum(num_learned(batch) for batch in batches) for name, batches in validation.items()}
    for name, batches in validation.items():
        mean = np.average([mean_token(batch) for batch in batches], weights=[num_learned(batch) for batch in batches])
        assert run.metrics[0][f"val/{name}/loss"] == pytest.approx(mean)
        assert run.metrics[0][f"val/{name}/num_tokens"] == tokens[name]
    both = np.average([run.metrics[0][f"val/{name}/loss"] for name in tokens], weights=list(tokens.values()))
    assert run.metrics[0]["val/loss"] == pytest.approx(both)
    assert run.metrics[0]["val/num_tokens"] == sum(tokens.values())


def test_columns_that_only_a_model_knows_are_read_before_a_step_and_in_validation():
    def complete(batch, model):
        return batch.with_columns({"ref_logprobs": model.infer(batch, [LOGPROBS], reference=True)["logprobs"]})

    run = FakeRun()
    policy = loop(
        run, data(validation=[rows(3, 20)]), complete=complete, max_num_steps=1, val_period=0, val_at_start=True
    )
    assert run.phases == ["validation", "data", "logprobs", "training"]
    assert [name for name, _ in policy.calls] == ["infer_reference", "evaluate", "infer_reference", "train_step"]
    assert all("ref_logprobs" in batch for name, batch in policy.calls if not name.startswith("infer"))


def test_a_goal_in_validation_ends_the_run():
    # the fake model's loss falls as 1 / (1 + steps)
    validation = [rows(3, 20)]
    goal = mean_token(validation[0]) / 4
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
