"""Which version of the policy plays at which step, and how it gets to the engines, with weights that are one number."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_core.data.batch import Batch
from rl_core.errors import CheckpointDamaged, FailureOrigin, RunDirectoryError, WeightSyncError
from rl_core.plugins import OpponentNeed
from rl_core.rollouts.delivery import Taken
from rl_core.weights import Manifest, TensorSpec
from rl_launch.runtime import opponents, weight_sync, weight_transfer
from rl_launch.runtime.opponents import OpponentSync, WrittenVersions, digest_of, is_due, playing
from rl_launch.runtime.weight_sync import Canary, WeightSync
from rl_launch.runtime.weight_transfer import WeightTransfer

SHARD = "model.safetensors"


class Policy:
    """A policy whose weights are its number of steps, which is also the logprob of every token."""

    def __init__(self):
        self.revision, self.num_writes = 0, 0

    def start_infer(self, batch, reads):
        tokens, steps = batch.ragged("tokens"), self.revision
        return lambda: Batch({"logprobs": tokens.like(np.full(len(tokens.values), -steps, np.float32))})

    def manifest(self, version, form):
        return Manifest(version, (TensorSpec("steps", (2,), "float32"),))

    def start_send(self, manifest, transport):
        origins = [FailureOrigin("policy", rank, "here", "send") for rank in (0, 1)]
        if transport.kind != "disk":
            return [["all"], []], origins
        self.num_writes += 1
        folder = Path(transport.address) / "written"
        folder.mkdir(parents=True)
        save_file({"steps": np.full(2, self.revision, np.float32)}, folder / SHARD)
        return [[digest_of(folder / SHARD)[1]], []], origins


class Replica:
    """A replica with an engine for each opponent, of one rank."""

    num_ranks, num_starts = 1, 1

    def __init__(self):
        self.playing, self.paused, self.num_loads, self.differs_by = {}, set(), 0, 0.0

    def call(self, method, *args):
        if method == "take_over":
            return Taken(["all"], [np.full(len(row), -self.policy.revision, np.float32) for row in args[1].canary])
        if method == "resume_opponent":
            self.paused.discard(args[0])
            return None
        name, manifest, delivery = args
        assert delivery.in_flight
        self.num_loads += 1
        self.paused.add(name)
        (shard,) = Path(delivery.transport.address).rglob(SHARD)
        steps = float(load_file(shard)["steps"][0])
        self.playing[name] = (manifest.version, steps)
        logprobs = [np.full(len(row), self.differs_by - steps, np.float32) for row in delivery.canary]
        return Taken([digest_of(shard)[1]], logprobs)

    def generator(self, method, *args):
        pass

    def origin(self, phase):
        return FailureOrigin("rollout worker", 0, "here", phase)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for module in (weight_sync, opponents):
        monkeypatch.setattr(module, "gather", lambda refs, origins, timeout=None: list(refs))
    for module in (weight_transfer, opponents):
        monkeypatch.setattr(module.ray, "put", lambda value: value)
    monkeypatch.setattr(weight_transfer, "settle", lambda refs, origins, timeout, **rest: (list(refs), []))


class Run:
    """A run whose every step publishes the next version."""

    def __init__(self, folder: Path, *needs: OpponentNeed, num_replicas=2):
        self.policy, addresses = Policy(), itertools.count()
        canary = Canary.of(50, precision="float32")
        way = WeightTransfer(
            self.policy,
            "policy",
            kind="collective",
            meet=lambda: f"here:{next(addresses)}",
            residency=None,
            gives_way=False,
            bucket_bytes=2**20,
        )
        self.sync = WeightSync(way, canary=canary, residency=None)
        self.opponents = OpponentSync(needs, self.sync, WrittenVersions(folder))
        self.replicas = [Replica() for _ in range(num_replicas)]
        for each in self.replicas:
            each.policy = self.policy

    def step(self):
        """Version of each opponent in the next step."""
        self.opponents.send(self.sync.publish(), self.replicas)
        assert not any(replica.paused for replica in self.replicas)
        (played,) = {tuple(replica.playing.items()) for replica in self.replicas}
        # the weights are those that the policy had when it published this version
        assert all(steps == version - 1 for _, (version, steps) in played)
        self.policy.revision += 1
        return {name: version for name, (version, _) in played}

    def steps(self, count, name="older"):
        return [self.step()[name] for _ in range(count)]

    def save(self, folder: Path):
        folder.mkdir(parents=True)
        self.opponents.save(str(folder))
        return SimpleNamespace(
            files=self.opponents.finish_save(), weights=self.sync.state(), steps=self.policy.revision
        )

    def resume(self, folder: Path, saved):
        self.opponents.load(str(folder), files=saved.files)
        self.sync.restore(saved.weights)
        self.policy.revision = saved.steps


def older(update_every, pool=1, name="older"):
    return OpponentNeed(name, {"second": 1.0}, update_every=update_every, pool=pool, seed=7)


def test_an_opponent_plays_the_version_of_the_last_update(tmp_path):
    run = Run(tmp_path, older(3))
    assert run.steps(8) == [1, 1, 1, 4, 4, 4, 7, 7]
    assert run.policy.num_writes == 3
    assert [replica.num_loads for replica in run.replicas] == [3, 3]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["version_7"]


def test_a_pool_holds_the_newest_versions_and_its_draws_repeat(tmp_path):
    played = Run(tmp_path / "a", older(2, pool=3)).steps(40)
    assert played == Run(tmp_path / "b", older(2, pool=3)).steps(40)
    for step, version in enumerate(played, start=1):
        newest = 1 + 2 * ((step - 1) // 2)
        assert version in range(max(1, newest - 4), newest + 1, 2)
    changes = [played[index] for index in range(8, 40, 2)]
    lags = {1 + 8 + 2 * place - version for place, version in enumerate(changes)}
    assert lags == {0, 2, 4}
    assert len(list((tmp_path / "a").glob("version_*"))) == 3


def test_opponents_with_other_periods_share_what_is_written(tmp_path):
    run = Run(tmp_path, older(2, name="a"), older(3, name="b"))
    played = [run.step() for _ in range(7)]
    assert [each["a"] for each in played] == [1, 1, 3, 3, 5, 5, 7]
    assert [each["b"] for each in played] == [1, 1, 1, 4, 4, 4, 7]
    assert run.policy.num_writes == 5


@pytest.mark.parametrize("after", [2, 3, 5])
def test_a_resumed_run_plays_as_the_undisturbed_one(tmp_path, after):
    whole = Run(tmp_path / "whole", older(3, pool=2)).steps(12)
    run = Run(tmp_path / "run", older(3, pool=2))
    run.steps(after)
    run.step()  # publishes the weights after that step, which are those of the checkpoint
    saved = run.save(tmp_path / "checkpoint")
    # a run that was killed leaves its folder behind
    later = Run(tmp_path / "run", older(3, pool=2), num_replicas=1)
    later.resume(tmp_path / "checkpoint", SimpleNamespace(files=saved.files, weights=saved.weights, steps=after))
    assert later.steps(12 - after) == whole[after:]


def test_a_branch_that_counts_versions_anew_has_opponents_of_its_own(tmp_path):
    run = Run(tmp_path / "run", older(3))
    run.steps(5)
    saved = run.save(tmp_path / "checkpoint")
    branch = Run(tmp_path / "branch", older(3))
    branch.opponents.load(str(tmp_path / "checkpoint"), files=saved.files)
    assert branch.steps(4) == [1, 1, 1, 4]


def test_a_checkpoint_of_other_opponents_is_refused(tmp_path):
    run = Run(tmp_path / "run", older(3))
    run.steps(1)
    saved = run.save(tmp_path / "checkpoint")
    with pytest.raises(RunDirectoryError, match="opponents older, but this run has another"):
        Run(tmp_path / "other", older(3, name="another")).resume(tmp_path / "checkpoint", saved)


def test_a_checkpoint_keeps_its_versions_while_the_run_drops_them(tmp_path):
    run = Run(tmp_path / "run", older(2))
    run.steps(2)
    saved = run.save(tmp_path / "checkpoint")
    (shard,) = (tmp_path / "checkpoint").rglob("*.safetensors")
    assert shard.stat().st_nlink == 2
    run.steps(3)
    assert shard.stat().st_nlink == 1
    assert load_file(shard)["steps"].tolist() == [0.0, 0.0]
    assert {file.path for file in saved.files} == {
        path.relative_to(tmp_path / "checkpoint").as_posix()
        for path in (tmp_path / "checkpoint").rglob("*")
        if path.is_file()
    }


def test_a_damaged_version_of_a_checkpoint_is_named(tmp_path):
    run = Run(tmp_path / "run", older(2))
    run.steps(2)
    saved = run.save(tmp_path / "checkpoint")
    (shard,) = (tmp_path / "checkpoint").rglob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="safetensors has other contents"):
        Run(tmp_path / "other", older(2)).resume(tmp_path / "checkpoint", saved)


def test_a_replica_that_starts_anew_loads_what_plays_and_the_others_do_not(tmp_path):
    run = Run(tmp_path, older(5))
    run.steps(3)
    first, second = run.replicas
    first.num_starts, first.playing = 2, {}
    assert run.steps(1) == [1]
    assert (first.num_loads, second.num_loads) == (2, 1)
    assert run.policy.num_writes == 1


def test_an_engine_that_computes_something_else_is_refused(tmp_path):
    run = Run(tmp_path, older(5))
    run.replicas[1].differs_by = 0.5
    with pytest.raises(WeightSyncError, match=r"opponent older, weight version 1.*differ"):
        run.step()
    assert run.replicas[1].paused == {"older"}


def test_a_version_is_due_after_the_period_and_for_an_opponent_that_has_none():
    assert is_due([], 17, update_every=5)
    assert [version for version in range(17, 30) if is_due([17], version, update_every=5)] == list(range(22, 30))
    assert playing([4], seed=0) == 4
