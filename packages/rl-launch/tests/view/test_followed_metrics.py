"""Metrics that follow their file, and their points for plots."""

import json
import random
from math import nan

import pytest
from made_runs import add_step, made_run

from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.view.metrics import FollowedMetrics, thinned


@pytest.fixture
def folder(tmp_path):
    return made_run(tmp_path / "run")


def followed(folder):
    metrics = FollowedMetrics(folder / "metrics.jsonl")
    metrics.update()
    return metrics


def test_rows_are_those_of_the_run(folder):
    add_step(folder, 4, **{"val/accuracy": 0.5, "mismatch/kl": None})

    rows = list(followed(folder).rows())

    expected = [{key: value for key, value in row.items() if value is not None} for row in RunFolder(folder).metrics()]
    assert rows == expected


def test_only_what_was_added_is_read(folder):
    metrics = followed(folder)
    with (folder / "metrics.jsonl").open("r+") as file:
        file.write("#")  # a second reading of the first line would fail

    add_step(folder, 4)
    metrics.update()

    assert list(metrics.steps) == [1, 2, 3, 4]


def test_a_line_is_taken_when_it_is_complete(folder):
    metrics = followed(folder)
    line = json.dumps({"step": 4, "new/metric": 2.5}) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[:10])
        file.flush()
        metrics.update()
        assert list(metrics.steps) == [1, 2, 3]
        file.write(line[10:])
    metrics.update()
    assert metrics.series("new/metric") == [(4, 2.5)]


def test_a_file_that_was_replaced_is_read_from_its_beginning(folder):
    metrics, path = followed(folder), folder / "metrics.jsonl"
    aside = path.with_name("aside")
    aside.write_text("".join(json.dumps({"step": step, "train/loss": 5.0}) + "\n" for step in range(1, 30)))
    aside.replace(path)

    metrics.update()

    assert len(metrics.steps) == 29
    assert "reward/mean" not in metrics.columns


def test_time_and_tokens_add_up(folder):
    add_step(folder, 4, **{"train/num_tokens": 100})
    add_step(folder, 5, **{"train/num_tokens": 50, "time/step": None})
    metrics = followed(folder)

    assert list(metrics.axis("time")) == [3.5, 7.0, 10.5, 14.0, 14.0]
    assert list(metrics.axis("tokens")) == [0, 0, 0, 100, 150]
    assert metrics.points("reward/mean", "time", 7.0, 11.0, 100)[0] == [7.0, 10.5]


def test_thinned_points_keep_every_peak():
    numbers = random.Random(0)
    points = [(float(place), numbers.gauss(0, 1)) for place in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[8765] = (8765.0, -99.0)

    kept = thinned(points, 400)

    assert len(kept) <= 400
    assert {points[0], points[-1], points[4321], points[8765]} <= set(kept)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)


def test_values_that_are_not_finite_are_left_out(folder):
    add_step(folder, 4, **{"train/loss": nan})

    assert [step for step, _ in followed(folder).series("train/loss")] == [1, 2, 3]
