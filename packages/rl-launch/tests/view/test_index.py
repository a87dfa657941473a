"""The index of rollouts: what it finds, what it reads again, and files that nobody should have written."""

import json
import os
import time

import pytest
from made_runs import add_step, group, lines, made_run, rollout

from rl_launch.run_session.rollouts import rollout_store
from rl_launch.view.index import RolloutIndex, RolloutLine, RolloutQuery, RunRollouts, SingleFile

FAR = time.monotonic() + 1e6


@pytest.fixture
def folder(tmp_path):
    return made_run(tmp_path / "run")


def indexed(folder, cache=None, kind="step"):
    source = RunRollouts(folder / "rollouts")
    index = RolloutIndex(source, cache)
    assert index.extend(kind, source.stamps(kind), FAR) == 0
    return index


def test_a_line_is_read_from_its_place(folder):
    index = indexed(folder)

    row = index.page(RolloutQuery(first=2, last=2), 3, 1)[0]
    line = index.read([RolloutLine(row["kind"], row["step"], row["row"], row["offset"], row["length"])])[0]

    assert json.loads(line) == (group(2, 0) + group(2, 1))[3]


def test_rollouts_are_filtered_and_sorted(folder):
    add_step(folder, 4, [rollout("p", 0, "a", 0.0), rollout("p", 1, "a b c", 1.0), rollout("q", 0, "a b", None)])
    index = indexed(folder)

    def found(**question):
        return [
            (row["prompt_id"], row["position"]) for row in index.page(RolloutQuery(first=4, last=4, **question), 0, 10)
        ]

    assert found() == [("p", 0), ("p", 1), ("q", 0)]
    assert found(sort="-num_tokens") == [("p", 1), ("q", 0), ("p", 0)]
    assert found(sort="rewards.format") == [("p", 1), ("p", 0), ("q", 0)]
    assert found(equal={"status": "failed"}) == [("q", 0)]
    assert found(least={"reward": 0.5}) == [("p", 1)]
    assert found(most={"reward": 0.5}) == [("p", 0)]
    assert index.count(RolloutQuery(first=1, last=4)) == 3 * 4 + 3
    assert index.choices("step", 4, 4)["status"] == ["failed", "ok"]


def test_a_step_that_grows_is_continued(folder):
    index, path = indexed(folder), folder / "rollouts" / "step_3.jsonl"
    with path.open("ab") as file:
        file.write(lines(group(3, 7)) + b'{"cut short')

    index.extend("step", [3], FAR)

    rows = index.page(RolloutQuery(first=3, last=3), 0, 10)
    assert [row["prompt_id"] for row in rows] == ["p0", "p0", "p1", "p1", "p7", "p7"]
    assert [row["row"] for row in rows] == list(range(6))


def test_a_step_that_was_made_again_is_read_again_although_its_file_is_longer(folder):
    index, path = indexed(folder), folder / "rollouts" / "step_3.jsonl"
    with path.open("r+b") as file:  # the same inode, as a new file may have
        file.write(lines(group(9, 5, size=8)))

    index.extend("step", [3], FAR)

    assert {row["prompt_id"] for row in index.page(RolloutQuery(first=3, last=3), 0, 100)} == {"p5"}


def test_a_step_that_is_gone_is_forgotten(folder):
    index = indexed(folder)
    (folder / "rollouts" / "step_3.jsonl").unlink()

    index.extend("step", [3], FAR)

    assert index.count(RolloutQuery(first=3, last=3)) == 0


def test_rollouts_in_an_archive_are_found_where_they_were(folder, monkeypatch):
    monkeypatch.setattr(rollout_store, "STEPS_PER_ARCHIVE", 2)
    monkeypatch.setattr(rollout_store, "NUM_RECENT", 0)
    before = indexed(folder).page(RolloutQuery(first=1, last=2), 0, 10)
    rollout_store.archive_before(folder / "rollouts", 3)
    assert not (folder / "rollouts" / "step_1.jsonl").exists()

    index = indexed(folder)
    after = index.page(RolloutQuery(first=1, last=2), 0, 10)

    assert after == before
    places = [RolloutLine(row["kind"], row["step"], row["row"], row["offset"], row["length"]) for row in after]
    assert [json.loads(line)["prompt_id"] for line in index.read(places)] == [row["prompt_id"] for row in after]


def test_the_cache_is_used_again_and_made_again_if_it_is_broken(folder, tmp_path):
    cache = tmp_path / "cache"
    indexed(folder, cache).close()
    (file,) = cache.glob("*.sqlite")

    kept = RolloutIndex(RunRollouts(folder / "rollouts"), cache)
    assert kept.count(RolloutQuery()) == 12
    kept.close()

    file.write_bytes(b"not a database" * 1000)
    assert indexed(folder, cache).count(RolloutQuery()) == 12


def test_nothing_is_written_into_the_run(folder, tmp_path):
    before = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))

    indexed(folder, tmp_path / "cache")

    assert sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_a_budget_ends_the_work_after_the_first_step(folder):
    index = RolloutIndex(RunRollouts(folder / "rollouts"), None)

    assert index.extend("step", [3, 2, 1], deadline=time.monotonic() - 1) == 2
    assert index.extend("step", [3, 2, 1], deadline=time.monotonic() - 1) == 1
    assert index.extend("step", [3, 2, 1], deadline=FAR) == 0


HOSTILE = [
    b"[1, 2]\n",
    b"not json\n",
    b"\n",
    b'{"rewards": [1], "turns": 3, "prompt": "text", "num_sampled": "many", "index": null}\n',
    b'{"rewards": {"reward": NaN}, "advantage": Infinity, "weight_versions": ["x"]}\n',
    b'{"prompt_id": {"a": 1}, "num_sampled": 1e400}\n',
    b"[" * 100_000 + b"\n",
    '{"prompt_id": "\u202e", "status": "<script>"}\n'.encode(),
    b'{"prompt_id": "\\ud800", "status": "\xff"}\n',
]


def test_lines_that_are_not_rollouts_do_not_hide_others(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(HOSTILE) + lines([rollout("last", 0, "x", 1.0)]))
    index = RolloutIndex(SingleFile(path, "file"), None)

    index.extend("file", [0], FAR)

    rows = index.page(RolloutQuery(kind="file"), 0, 100)
    assert rows[-1]["prompt_id"] == "last"
    assert len(rows) == len(HOSTILE)  # without the empty line
    assert [row["status"] for row in rows[:2]] == ["unreadable", "unreadable"]


def test_a_line_that_is_too_long_is_listed_and_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_launch.view.index.MAX_LINE_BYTES", 1000)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(lines([rollout("long", 0, "x" * 5000, 1.0), rollout("short", 0, "x", 1.0)]))
    index = RolloutIndex(SingleFile(path, "file"), None)

    index.extend("file", [0], FAR)

    rows = index.page(RolloutQuery(kind="file"), 0, 10)
    assert [(row["prompt_id"], row["status"]) for row in rows] == [(None, "too long"), ("short", "ok")]


def test_a_folder_that_cannot_hold_the_cache_is_done_without(folder, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")

    assert indexed(folder, in_the_way / "cache").count(RolloutQuery()) == 12
    assert os.listdir(tmp_path).count("file") == 1
