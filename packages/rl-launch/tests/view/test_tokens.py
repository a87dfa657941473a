"""Tokens of a rollout as the page asks for them."""

import pytest
from made_runs import add_step, add_tokens, made_run, rollout

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.rollouts import rollout_store
from rl_launch.view.answers import ANSWERS
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.parameters import Parameters
from rl_launch.view.tokens import shown_texts


@pytest.fixture
def run(tmp_path):
    folder = made_run(tmp_path / "one")
    add_step(folder, 4, [rollout("p0", index, "a b", 1.0) for index in range(3)])
    return folder


def ask(run, row=0, step=4, kind="step", **given):
    values = {"id": run.name, "kind": kind, "step": step, "row": row, **given}
    return ANSWERS["tokens"](
        PageCatalog([run.parent]), Parameters({key: [str(value)] for key, value in values.items()})
    )


def test_a_rollout_has_texts_values_and_the_ranges_of_its_sampled_tokens(run):
    add_tokens(run, 4, num_rollouts=2, num_sampled=3)
    found = ask(run, 1)

    columns = found["columns"]
    assert columns["text"] == ["<|user|>", "hi ", "", "\u20ac", "w0\n", "w1\n", "w2\n"]
    assert columns["part"] == ["", "", "e2 82", "", "", "", ""]
    assert columns["is_special"] == [1, 0, 0, 0, 0, 0, 0]
    assert columns["loss_mask"] == [0, 0, 1, 1, 1, 1, 1]
    assert columns["logprob"] == [None, -9.0, -0.5, -1.0, -1.5, -2.0, -2.5]
    assert columns["generation_logprob"] == [None, None, -0.25, -0.75, -1.25, -1.75, -2.25]
    assert columns["difference"] == [None, None, -0.25, -0.25, -0.25, -0.25, -0.25]
    assert columns["weight_version"] == [None, None, 3, 3, 3, 3, 4]
    assert found["ranges"] == {
        "logprob": [-2.5, -0.5],
        "generation_logprob": [-2.25, -0.25],
        "difference": [-0.25, -0.25],
        "advantage": [1.5, 1.5],
    }
    assert (found["count"], found["versions"], found["num_segments"]) == (7, [3, 4], 1)


def test_a_long_rollout_comes_in_pages(run, monkeypatch):
    monkeypatch.setattr("rl_launch.view.tokens.MAX_TOKENS", 4)
    add_tokens(run, 4, num_rollouts=1, num_sampled=3)
    assert [len(ask(run, offset=offset)["columns"]["text"]) for offset in (0, 4, 8)] == [4, 3, 0]
    assert ask(run, offset=4)["columns"]["text"] == ["w0\n", "w1\n", "w2\n"]
    assert ask(run, offset=4)["count"] == 7


def test_lines_of_lost_rollouts_do_not_give_a_rollout_the_tokens_of_another(run):
    add_tokens(run, 4, num_rollouts=3)
    add_step(run, 4, [rollout("p0", index, "a b", 1.0) for index in (0, 2)])
    assert [ask(run, row)["ranges"]["advantage"] for row in (0, 1)] == [[0.5, 0.5], [2.5, 2.5]]
    add_step(run, 5, [rollout("other", 0, "a b", 1.0)])
    add_tokens(run, 5, num_rollouts=1)
    assert ask(run, 0, step=5)["count"] == 0


def test_without_tokens_the_answer_names_the_key_that_records_them(run):
    assert "logger.token_level=sampled or all records them" in ask(run)["reason"]
    add_tokens(run, 4, num_rollouts=2)
    found = ask(run, 2)
    assert (found["count"], found["others"]) == (0, [0, 1])
    assert "logger.token_level=all records those of every rollout" in found["reason"]

    with (run / "config.yaml").open("a") as file:
        file.write("logger: {token_level: none}\n")
    assert "logger.token_level is none" in ask(run, step=3)["reason"]
    (run / "rollouts" / "val_3.jsonl").write_bytes((run / "rollouts" / "step_3.jsonl").read_bytes())
    assert "training steps only" in ask(run, step=3, kind="val")["reason"]


def test_tokens_in_an_archive_are_read(run, monkeypatch):
    monkeypatch.setattr(rollout_store, "STEPS_PER_ARCHIVE", 4)
    monkeypatch.setattr(rollout_store, "NUM_RECENT", 0)
    add_tokens(run, 4, num_rollouts=2)
    before = ask(run, 1)
    rollout_store.archive_before(run / "rollouts", 4)
    assert not (run / "rollouts" / "tokens_4.parquet").exists()
    assert ask(run, 1) == before


def test_a_file_that_is_not_one_of_tokens_is_one_message(run):
    (run / "rollouts" / "tokens_4.parquet").write_bytes(b"something else")
    with pytest.raises(RunDirectoryError, match="the file of tokens of step 4 cannot be read"):
        ask(run)


def test_characters_of_several_tokens_are_shown_at_the_last_of_them():
    euro = "\u20ac".encode()
    assert shown_texts([b"a", euro[:1], euro[1:], None], [0, 0, 0, 0]) == (
        ["a", "", "\u20ac", None],
        ["", "e2", "", ""],
    )
    # a segment ends what it has begun, and bytes that are no text are replaced
    assert shown_texts([euro[:1], b"b", b"\xff"], [0, 1, 1]) == (["", "b", "\ufffd"], ["e2", "", ""])
