"""Values of tokens: what is in the files, which rollouts are chosen, and what failures cost."""

import dataclasses
import logging

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_tokens import Texts, aside_group, prompt, rollout, trained_batch, trained_group

from rl_core.data.batch import RemoteRows
from rl_core.errors import WorkerDied
from rl_core.rollouts.group import RolloutGroup
from rl_launch.run_session import LoggerConfig, RunSession
from rl_launch.run_session.rollouts import rollout_store, run_files
from rl_launch.run_session.rollouts.run_files import MAX_STEPS, TokenFiles, recorded_rows
from rl_launch.run_session.rollouts.token_table import RecordedRollout, TokenRows, read_tokens, recorded_rollouts


@pytest.fixture
def files(tmp_path):
    made = TokenFiles(tmp_path, "all", 1)
    made.read_texts_from(Texts())
    yield made
    made.close()


def rows_of(folder, step=3):
    return pq.read_table(folder / f"tokens_{step}.parquet").to_pylist()


# step, rollout, prompt, index, segment, position, token, text, special, mask, version, generator, trainer, advantage
BY_HAND = [
    (3, 0, "a", 0, 0, 0, 5, b"t5", True, False, None, None, None, None),
    (3, 0, "a", 0, 0, 1, 6, b"t6", False, True, 3, -0.5, -1.0, 0.5),
    (3, 0, "a", 0, 0, 2, 7, b"t7", False, True, 4, -1.0, -2.0, 0.5),
    (3, 1, "a", 1, 0, 0, 5, b"t5", True, False, None, None, None, None),
    (3, 1, "a", 1, 0, 1, 6, b"t6", False, True, 4, -0.5, -4.0, 1.5),
    (3, 1, "a", 1, 1, 0, 7, b"t7", False, False, None, None, None, None),
    (3, 1, "a", 1, 1, 1, 8, b"t8", False, False, None, None, -6.0, None),
    (3, 1, "a", 1, 1, 2, 9, None, False, True, 4, -1.0, -7.0, 2.5),
    (3, 2, "b", 0, 0, 0, 5, b"t5", True, False, None, None, None, None),
    (3, 2, "b", 0, 0, 1, 1, b"t1", False, False, 4, -0.5, None, None),
    (3, 3, "b", 1, 0, 0, 5, b"t5", True, False, None, None, None, None),
]


def test_a_step_of_segments_versions_and_rollouts_set_aside_is_as_worked_out_by_hand(tmp_path, files):
    group = trained_group()
    files.append(3, [group, aside_group()], trained_batch(group))
    files.flush()

    assert [tuple(row.values()) for row in rows_of(tmp_path)] == [(*row, None) for row in BY_HAND]


def test_advantages_by_token_the_entropy_and_a_mask_that_was_emptied_are_those_of_the_batch(tmp_path, files):
    group = trained_group()
    batch = trained_batch(group)
    tokens = batch.ragged("tokens")
    numbers = np.arange(len(tokens.values), dtype=np.float32)
    batch = batch.with_columns({"advantages": tokens.like(numbers), "prev_entropy": tokens.like(10 + numbers)})
    files.append(3, [group], batch.with_zeros("loss_mask", np.array([True, False, False])))
    files.flush()

    rows = rows_of(tmp_path)
    assert [row["advantage"] for row in rows] == [None, None, None, None, 4, None, None, 7]
    assert [row["entropy"] for row in rows] == [None, 11, 12, None, 14, None, 16, 17]
    assert [row["loss_mask"] for row in rows[:3]] == [False, False, False]
    assert [row["generation_logprob"] for row in rows[:3]] == [None, -0.5, -1.0]


def test_a_rollout_is_found_in_a_file_of_many(tmp_path, files, monkeypatch):
    monkeypatch.setattr("rl_launch.run_session.rollouts.token_table.CHUNK_TOKENS", 4)
    groups = [trained_group() for _ in range(5)]
    files.append(3, groups, trained_batch(*groups))
    files.flush()

    path = tmp_path / "tokens_3.parquet"
    assert pq.ParquetFile(path).num_row_groups == 10
    with path.open("rb") as file:
        assert recorded_rollouts(file) == [RecordedRollout(n, "a", n % 2) for n in range(10)]
        assert read_tokens(file, 6)["token_id"] == [5, 6, 7]
        assert read_tokens(file, 7)["rollout"] == [7] * 5
        assert read_tokens(file, 10)["token_id"] == []


def test_groups_are_drawn_by_the_step_and_their_tokens_are_bounded(monkeypatch):
    groups = [dataclasses.replace(trained_group(), prompt=prompt(f"p{n}")) for n in range(20)]
    batch = trained_batch(*groups)

    def drawn(step, count) -> TokenRows:
        (rows,) = recorded_rows(step, [*groups, aside_group()], batch, count)
        return rows

    two = drawn(1, 2)
    assert len(set(two.prompt_id)) == 2
    assert list(two.rollout) == sorted(two.rollout)
    assert {f"p{line // 2}" for line in two.rollout} == set(two.prompt_id)
    assert two.prompt_id == drawn(1, 2).prompt_id
    assert len({tuple(drawn(step, 2).prompt_id) for step in range(10)}) > 1
    assert len(drawn(1, 30).rollout) == len(batch)
    assert np.array_equal(
        two.columns.ragged("prev_logprobs").values,
        [-8 * (line // 2) - at for line in two.rollout[::3] for at in range(8)],
    )

    monkeypatch.setattr(run_files, "TOKENS_PER_GROUP", 5)
    assert list(drawn(1, 1).index) == [0]
    assert list(drawn(1, 2).index) == [0, 1, 1]
    monkeypatch.setattr(run_files, "TOKENS_PER_GROUP", 1)
    assert list(drawn(1, 1).index) == [0]


@pytest.mark.parametrize("num_rows", [2, 7])
def test_a_batch_of_other_rows_is_refused(num_rows):
    batch = trained_batch(trained_group(), trained_group(), trained_group()).select(np.arange(num_rows))
    with pytest.raises(ValueError, match=rf"a batch of {num_rows} rows does not belong to these groups.*\[3, 6\]"):
        recorded_rows(1, [trained_group()] * 2, batch, 1)


def test_a_full_disk_is_reported_once_and_costs_only_the_steps_that_it_concerns(tmp_path, files, caplog):
    caplog.set_level(logging.INFO)
    group = trained_group()
    for step in (1, 2, 3):
        if step < 3:
            (tmp_path / f".tokens_{step}.parquet.part").symlink_to("/dev/full")
        files.append(step, [group], trained_batch(group))
        files.flush()

    assert [path.name for path in tmp_path.iterdir()] == ["tokens_3.parquet"]
    assert len(rows_of(tmp_path)) == 8
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "step 1: the values of its tokens were not recorded (OSError: [Errno 28] No space left" in warning
    (again,) = [each.getMessage() for each in caplog.records if "recorded again" in each.getMessage()]
    assert again == "step 3: values of tokens are recorded again; those of 2 steps are missing"


class Lost:
    """Columns that were lost with a node."""

    def fetch(self):
        raise WorkerDied("its node died")


def test_columns_that_were_lost_with_a_node_are_reported_and_the_step_is_complete(tmp_path, files, caplog):
    group = trained_group()
    batch = trained_batch(group)
    batch = batch.with_columns(RemoteRows.of(Lost(), batch.lengths).columns(["prev_logprobs"]))
    files.append(1, [group], batch)
    files.flush()

    assert "not recorded (WorkerDied: its node died" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_tokens_without_a_tokenizer_have_ids_only(tmp_path):
    files = TokenFiles(tmp_path, "sampled", 1)
    group = trained_group()
    files.append(3, [group], trained_batch(group))
    files.flush()
    files.close()
    assert {row["text"] for row in rows_of(tmp_path)} == {None}


def test_files_of_tokens_move_into_archives_and_come_back(tmp_path, files, monkeypatch):
    monkeypatch.setattr(rollout_store, "STEPS_PER_ARCHIVE", 2)
    monkeypatch.setattr(rollout_store, "NUM_RECENT", 0)
    group = trained_group()
    for step in (1, 2):
        files.append(step, [group], trained_batch(group))
    files.flush()
    rollout_store.archive_before(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["steps_1-2.zip"]
    assert rollout_store.steps_in(tmp_path, "tokens") == [1, 2]
    assert rollout_store.steps_in(tmp_path) == []
    with rollout_store.open_step(tmp_path, 2, "tokens") as file:
        assert read_tokens(file, 1)["token_id"] == [5, 6, 7, 8, 9]

    rollout_store.cut_back(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens_1.parquet"]


def session_of(folder, counting, **logger):
    config = counting.config().model_copy(update={"logger": LoggerConfig(tensorboard_enabled=False, **logger)})
    return RunSession(folder, config)


def record(session, step):
    group = RolloutGroup.of(prompt("a"), [rollout("a", [5, 5 + step], [0, 1], ((step, 1),))] * 2)
    session.record_rollouts(step, [group], np.zeros(2), batch=trained_batch(group))


def test_a_killed_run_keeps_no_tokens_of_steps_that_come_again(tmp_path):
    import counting_run as counting

    models = {"policy": counting.CountingModel()}
    state = {"draws": counting.Draws()}

    def steps_until(session, last):
        for step in session.steps(6, models=models, state=state):
            record(session, step)
            if step == last:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"), session_of(tmp_path, counting) as session:
        steps_until(session, 5)
    names = {path.name for path in (tmp_path / "rollouts").glob("*.parquet")}
    assert names == {f"tokens_{step}.parquet" for step in range(1, 6)}
    (tmp_path / "rollouts" / ".tokens_6.parquet.part").write_bytes(b"half")

    with session_of(tmp_path, counting) as session:
        session.steps(6, models=models, state=state)
        assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
            *(f"step_{step}.jsonl" for step in range(1, 5)),
            *(f"tokens_{step}.parquet" for step in range(1, 5)),
        ]
    with session_of(tmp_path, counting) as session:
        steps_until(session, None)
    found = {step: [row["token_id"] for row in rows_of(tmp_path / "rollouts", step)] for step in range(1, 7)}
    assert found == {step: [5, 5 + step] * 2 for step in range(1, 7)}


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        ({"token_level": "none"}, []),
        ({"rollout_period": 0}, []),
        ({"rollout_period": 2}, ["tokens_2.parquet"]),
        ({"token_level": "all"}, ["tokens_1.parquet", "tokens_2.parquet"]),
    ],
)
def test_tokens_are_recorded_where_rollouts_are(tmp_path, logger, expected):
    import counting_run as counting

    with session_of(tmp_path, counting, **logger) as session:
        for step in session.steps(2, models={}, state={}):
            record(session, step)
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("tokens*")) == expected


def test_a_step_waits_for_the_tokens_of_much_earlier_ones(tmp_path, files, monkeypatch):
    waited = []
    monkeypatch.setattr(files, "_write", lambda step, parts: waited.append(step))
    group = trained_group()
    for step in range(MAX_STEPS + 3):
        files.append(step, [group], trained_batch(group))
        assert len(files._writing) <= MAX_STEPS
    files.flush()
    assert waited == list(range(MAX_STEPS + 3))


def test_all_tokens_without_rollouts_is_refused():
    with pytest.raises(ValueError, match=r"needs the rollouts.*Set logger.rollout_period=1"):
        LoggerConfig(token_level="all", rollout_period=0)
