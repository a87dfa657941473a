"""Rows of a run for `rl doctor mismatch`, and its report."""

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_algos.rollouts.mismatch import MismatchFinding, MismatchGap
from rl_core.errors import RLError
from rl_launch.commands import mismatch
from rl_launch.commands.mismatch import MismatchReport, described, sampled_step
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.directory.run_folder import CONFIG, DESCRIPTION, RunFolder

LENGTH, PROMPT = 6, 2
GAP = MismatchGap(mean=0.2, largest=0.9, rows=1.0, num_tokens=64, generator=0.2, policy=1e-6)
FINDING = MismatchFinding(
    "temperature", "temperature in one of the two", "0.8 instead of 1", "generator", 0.99, "Set it."
)


@pytest.fixture
def run(tmp_path):
    """A run that has recorded two steps, without a checkpoint."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / DESCRIPTION).write_text("{}")
    (tmp_path / CONFIG).write_text("{}")
    for step in (1, 2):
        rows = [{"rollout": number, "segment": 0, "version": step} for number in range(3)]
        # Older weights have sampled one of the rollouts.
        rows[1]["version"] = 1
        pq.write_table(
            pa.Table.from_pylist([token for row in rows for token in tokens_of(**row)]), path(tmp_path, step)
        )
    return RunFolder(tmp_path)


def path(folder, step):
    return folder / "rollouts" / f"tokens_{step}.parquet"


def tokens_of(rollout, segment, version):
    for place in range(LENGTH):
        is_sampled = place >= PROMPT
        yield {
            "rollout": rollout,
            "segment": segment,
            "token_id": 10 * rollout + place,
            "loss_mask": is_sampled,
            "weight_version": version if is_sampled else None,
            "generation_logprob": -float(place) if is_sampled else None,
            "logprob": -float(place) - 0.5 if place else None,
        }


def test_the_rows_are_those_that_known_weights_have_sampled(run):
    found = sampled_step(run, "the first weights")
    # No weights of version 2 are there, so that only one row of step 2 can be examined.
    assert (found.step, found.version, found.model) == (2, 1, "the first weights")
    assert [row.tolist() for row in found.rows.tokens] == [list(range(10, 10 + LENGTH))]
    assert found.rows.mask[0].tolist() == [0] * PROMPT + [1] * (LENGTH - PROMPT)
    assert found.rows.generation[0][PROMPT:].tolist() == [-2.0, -3.0, -4.0, -5.0]
    assert found.rows.policy[0][PROMPT:].tolist() == [-2.5, -3.5, -4.5, -5.5]
    assert found.older == ()


def test_logprobs_that_were_not_recorded_are_not_known(run):
    step = 1
    table = pq.read_table(path(run.path, step))
    nothing = pa.nulls(len(table), pa.float32())
    pq.write_table(table.set_column(table.schema.get_field_index("logprob"), "logprob", nothing), path(run.path, step))
    path(run.path, 2).unlink()
    found = sampled_step(run, "the first weights")
    assert found.rows.policy is None
    assert len(found.rows.tokens) == 3


def test_a_step_whose_tokens_are_damaged_is_left_out(run, caplog):
    damaged = path(run.path, 2)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert sampled_step(run, "the first weights").step == 1
    assert "the tokens of step 2 cannot be read, so an earlier step is examined" in caplog.text


@pytest.mark.parametrize(
    ("fault", "remark", "tried"),
    [
        ("sampling", "is right (it differs from transformers by 0): the fault arises while the run samples", []),
        ("attention", "a new hf engine is off by 0.5 as well", ["attn_implementation=eager"]),
        ("start", "so its settings were not tried: no memory", []),
    ],
)
def test_engines_are_tried_alone_and_with_one_setting_changed(run, monkeypatch, tmp_path, fault, remark, tried):
    found = sampled_step(run, "the first weights")
    mask = found.rows.mask.values > 0
    right = found.rows.policy.values

    def answers(python, code, path, **_):
        if fault == "start":
            raise RLError("the engine hf ended:\nTraceback\nno memory")
        _, (_, settings, model, _), rows = pickle.loads(Path(path).read_bytes())
        assert (model.model_name, len(rows)) == ("the first weights", 1)
        is_off = fault == "attention" and settings.attn_implementation != "eager"
        yield "scores", json.dumps([(right + 0.5 * is_off).tolist()])

    monkeypatch.setattr(mismatch, "worker_answers", answers)
    monkeypatch.setattr(mismatch, "provision", lambda specs, envs: dict.fromkeys(specs, "python"))
    generator = {"generation": {"backend": "hf"}}
    plan = read_plan({"defaults": "grpo-arithmetic", "policy": generator, "cluster": {"device": "cpu"}})
    gap = dataclasses.replace(GAP, mean=0.5)
    attempts, said = mismatch._engines(plan, found, found.rows, gap, right[mask], right[mask], tmp_path)
    assert remark in said
    assert "\n" not in said
    assert [each.detail.rpartition(".")[2] for each in attempts] == tried
    assert all(each.left == pytest.approx(0.0, abs=1e-6) for each in attempts)


def test_a_report_shows_the_gap_the_causes_and_the_remedy():
    report = MismatchReport("runs/a", 3, 3, 8, GAP, True, (FINDING,), 100)
    text = "\n".join(described(report))
    assert "differ by 0.2 nats on average over 64 tokens, at most by 0.9, in 100% of 8 rows" in text
    assert "  99%  temperature in one of the two: 0.8 instead of 1" in text
    assert text.endswith("The generator computes with 0.8 instead of 1. Set it.")
    remedied = dataclasses.replace(report, findings=(dataclasses.replace(FINDING, cause="engine", detail="a=b"),))
    assert list(described(remedied))[-1] == "The gap closes with a=b. Set it."
    assert report.as_json()["first"] == dataclasses.asdict(FINDING)


def test_a_change_that_closes_little_is_not_called_the_cause():
    little = dataclasses.replace(FINDING, closed=0.1)
    report = MismatchReport("runs/a", 3, 3, 8, GAP, True, (little,), 100)
    assert report.first is None
    assert "No change closes" in list(described(report))[-1]


def test_rounding_is_no_gap():
    gap = dataclasses.replace(GAP, mean=1e-7, largest=1e-6)
    report = MismatchReport("runs/a", 3, 3, 8, gap, False, (), 100)
    assert list(described(report))[-1] == "This is rounding: they compute the same."
    assert report.first is None


def test_rows_are_read_as_they_were_written(run, tmp_path):
    rows = sampled_step(run, "weights").rows
    rows.write(tmp_path / "rows.npz")
    again = type(rows).read(tmp_path / "rows.npz")
    for name in ("tokens", "mask", "generation", "policy"):
        np.testing.assert_array_equal(getattr(again, name).values, getattr(rows, name).values)
