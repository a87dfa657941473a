"""The facade of a model of several ranks: what its rows give must not depend on where they lie."""

import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray
from row_worker import RowLoss

from rl_core.data.batch import Batch, RemoteColumn, RemoteRows
from rl_core.data.ragged import Ragged
from rl_core.errors import FailureOrigin, WorkerDied, WorkerError
from rl_core.model import LOGPROBS, Coordinates
from rl_core.ray import model as model_module
from rl_core.ray.calls import gather
from rl_core.ray.host import CONCURRENCY_GROUPS, WorkerHost
from rl_core.ray.model import RemoteModel
from rl_core.ray.rows import StoredRows

ON_PATH = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}}
ORIGIN = FailureOrigin("rollout worker", 0, "here", "rollouts")
SHAPE = {"dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def start(local_ray):
    actors = []

    def start(place):
        host = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerHost)
        actor = host.options(num_cpus=0, runtime_env=ON_PATH).remote()
        actor.build.remote("row_worker:RowWorker", place)
        actors.append(actor)
        return actor

    yield start
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def workers(start):
    return [start(Coordinates({"dp": rank // 2, "tp": rank % 2}, SHAPE)) for rank in range(4)]


@pytest.fixture
def model(workers):
    return RemoteModel(workers, role="policy", nodes=["here"] * 4, timeout_s=120)


def local_batch(num_rows):
    random = np.random.default_rng(num_rows)
    lengths = random.integers(1, 6, num_rows)
    tokens = Ragged.from_rows([random.integers(0, 99, each) for each in lengths], np.int32)
    mask = tokens.like(random.integers(0, 2, len(tokens.values)).astype(np.uint8))
    return Batch({"tokens": tokens, "loss_mask": mask, "advantages": random.random(num_rows, dtype=np.float32)})


def with_columns_elsewhere(batch, sizes, workers):
    """The same rows, their token-aligned columns in as many stores as there are sizes."""
    names = ["tokens", "loss_mask"]
    parts = []
    for part in batch.split(sizes):
        ref = workers[0].call.remote("echo", part.only(names))
        parts.append(Batch(RemoteRows.of(StoredRows(ref, ORIGIN), part.lengths).columns(names)))
    return Batch.concat(parts).with_columns({"advantages": batch.array("advantages")})


def stepped(model, batch):
    found = model.infer(batch, [LOGPROBS], temperature=0.5)
    frozen = model.infer(batch, [LOGPROBS], reference=True)
    trained = batch.with_columns({"prev_logprobs": found.columns["logprobs"]})
    halves = trained.split([len(batch) // 2, len(batch) - len(batch) // 2])
    return found, frozen, [model.train_step(half, RowLoss()) for half in halves]


def test_results_come_in_the_order_of_the_rows(model):
    batch = local_batch(11)
    found, frozen, _ = stepped(model, batch)
    tokens = batch.ragged("tokens")
    assert found.ragged("logprobs").equals(tokens.like(tokens.values.astype(np.float32) * 2))
    assert frozen.ragged("logprobs").equals(found.ragged("logprobs"))


@pytest.mark.parametrize("tokens_per_picker", [model_module.TOKENS_PER_PICKER, 8], ids=["one picker", "several"])
@pytest.mark.parametrize("sizes", [[11], [3, 5, 3], [1] * 11], ids=["one", "three", "each"])
def test_rows_that_lie_elsewhere_give_what_local_ones_give(model, workers, sizes, tokens_per_picker, monkeypatch):
    monkeypatch.setattr(model_module, "TOKENS_PER_PICKER", tokens_per_picker)
    near = local_batch(11)
    far = with_columns_elsewhere(near, sizes, workers)
    found, frozen, metrics = stepped(model, near)
    also_found, also_frozen, also_metrics = stepped(model, far)
    assert isinstance(also_found.columns["logprobs"], RemoteColumn)
    assert also_found.ragged("logprobs").equals(found.ragged("logprobs"))
    assert also_frozen.ragged("logprobs").equals(frozen.ragged("logprobs"))
    assert also_metrics == metrics


def test_shards_of_one_rank_each_give_what_shards_of_several_give(model, workers, start):
    alone = RemoteModel(
        [start(Coordinates({"dp": rank}, {"dp": 2})) for rank in range(2)], role="policy", nodes=["here"] * 2
    )
    batch = with_columns_elsewhere(local_batch(11), [3, 5, 3], workers)
    found, _, metrics = stepped(model, batch)
    also_found, _, also_metrics = stepped(alone, batch)
    assert also_found.ragged("logprobs").equals(found.ragged("logprobs"))
    assert also_metrics == metrics


def test_a_shard_may_have_no_rows(model, workers):
    found, _, metrics = stepped(model, with_columns_elsewhere(local_batch(1), [1], workers))
    assert len(found) == 1
    assert metrics[1]["most_rows"].result() == 1


def test_rows_that_were_regrouped_for_one_pass_serve_the_next(model, workers):
    batch = with_columns_elsewhere(local_batch(6), [2, 4], workers)
    model.infer(batch, [LOGPROBS])
    (sent,) = model._sent.values()
    model.infer(batch.with_columns({"new": np.zeros(6)}), [LOGPROBS], reference=True)
    assert [*model._sent.values()] == [sent]
    del batch
    assert not model._sent


def test_every_rank_moves_its_reference(model):
    batch = local_batch(5)
    tokens = batch.ragged("tokens").values
    for share, factor in ((0.5, 2.5), (-0.5, 2.0)):  # back, for the other tests of these workers
        model.update_reference(share)
        found = model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").values
        np.testing.assert_allclose(found, factor * tokens)


def test_a_model_that_has_left_its_device_comes_back_to_send(workers):
    away = []

    @contextmanager
    def hold():
        if away:
            away.pop().onload()
        yield

    model = RemoteModel(workers, role="policy", nodes=["here"] * 4, hold=hold, timeout_s=120)
    model.offload()
    away.append(model)
    refs, origins = model.start_send(None, None)
    assert gather(refs, origins, 120) == [["digest"]] * 4


class Rule:
    """A store that is in no object store: it knows how to make its rows."""

    def __init__(self, lengths):
        self.lengths = lengths

    def fetch(self):
        return Batch({"routed_experts": Ragged.from_rows([np.arange(each) for each in self.lengths], np.int16)})


def test_columns_that_all_passes_read_come_with_every_call(workers):
    model = RemoteModel(workers, role="policy", nodes=["here"] * 4, timeout_s=120, columns=["routed_experts"])
    batch = with_columns_elsewhere(local_batch(6), [2, 4], workers)
    assert stepped(model, batch)[2][0]["num_routed"].result() == 0
    ruled = RemoteRows.of(Rule(batch.lengths), batch.lengths).columns(["routed_experts"])
    found, _, metrics = stepped(model, batch.with_columns(ruled))
    assert [row.tolist() for row in found.ragged("logprobs")] == [list(range(each)) for each in batch.lengths]
    assert metrics[0]["num_routed"].result() == model.num_shards


def test_columns_that_a_dead_process_did_not_leave_are_a_death(model, start):
    near = local_batch(4)
    ref = start(Coordinates({}, {})).call.remote("end")
    batch = Batch(RemoteRows.of(StoredRows(ref, ORIGIN), near.lengths).columns(["tokens"]))
    with pytest.raises(WorkerDied, match=r"policy rank \d .*the process ended"):
        model.infer(batch, [LOGPROBS])
    with pytest.raises(WorkerDied, match=r"rollout worker rank 0 .*the process ended"):
        batch.ragged("tokens")


def test_a_part_of_the_workers_is_called_as_a_model(model):
    batch = local_batch(11)
    head, revision = model.part("head", role="drafter", section="policy.head"), model.revision
    prepared = batch.with_columns({"prev_logprobs": batch.ragged("tokens")})
    assert head.train_step(prepared, RowLoss())["num_rows"].value == 11
    refs, origins = head.start_send(None, None)
    assert gather(refs, origins, 60) == [["digest of the head"]] * 4
    assert (head.revision, model.revision) == (1, revision)
    with pytest.raises(WorkerError, match=r"^drafter \(config section policy\.head\) rank \d on here during"):
        head.call_all("missing")


def test_a_failure_names_the_config_section_that_keys_in_it_are_relative_to(workers):
    model = RemoteModel(workers, role="teacher", section="teachers.first", nodes=["here"] * 4, timeout_s=120)
    with pytest.raises(WorkerError, match=r"^teacher \(config section teachers\.first\) rank \d on here during"):
        model.call_all("missing")
