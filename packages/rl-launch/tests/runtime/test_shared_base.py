"""Several runs on one base, with a model that notes what it is asked for."""

import json
import threading
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from rl_algos.losses.tokens import NLLLoss
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import CheckpointDamaged, RLError, WorkerDied
from rl_core.metrics import Metric
from rl_core.model import ADAPTER, LOGPROBS, AdapterSettings, SavedFile
from rl_core.model_config import ModelConfig
from rl_launch.runtime.adapter_places import AdapterPlaces, AdapterWork
from rl_launch.runtime.shared_base import AdapterModel, SharedBase, base_key

BAD = 99
"""A token that the model refuses."""


class NotedAdapters:
    def __init__(self):
        self.made, self.loaded, self.exported = {}, [], []

    def make(self, place, settings):
        self.made[place] = settings

    def save(self, place, path):
        Path(path, "factors").write_text(str(place))
        return (SavedFile("factors", 1, None, 0),)

    def load(self, place, path, *, with_optimizer=True, files=()):
        self.loaded.append((place, path, with_optimizer, tuple(file.path for file in files)))

    def export(self, place, path, *, merged=False):
        self.exported.append((place, merged))
        return ()

    def rates(self, lr, scheduler, count):
        return [lr / (step + 1) for step in range(count)]


class NotedModel:
    """A model whose loss is the sum of the tokens; `gate` holds its passes until it is set."""

    def __init__(self):
        self.adapters = NotedAdapters()
        self.passes, self.steps, self.discarded = [], [], []
        self.gate = threading.Event()
        self.gate.set()

    def accumulate(self, batch, losses):
        assert self.gate.wait(30)
        tokens, places = batch.ragged("tokens"), batch.array(ADAPTER)
        if (tokens.values == BAD).any():
            raise RLError("a token is refused")
        self.passes.append(sorted(losses.losses))
        metrics = self._metrics(batch, losses)
        return metrics, Batch({"logprobs": tokens.like(np.repeat(places, tokens.lengths).astype(np.float32))})

    def evaluate(self, batch, losses):
        return self._metrics(batch, losses)

    def infer(self, batch, reads, **options):
        tokens = batch.ragged("tokens")
        return Batch({"logprobs": tokens.like(np.repeat(batch.array(ADAPTER), tokens.lengths).astype(np.float32))})

    def apply(self, settings, *, adapter):
        self.steps.append((adapter, settings.lr, settings.max_grad_norm, dict(settings.kwargs)))
        return {"grad_norm": Metric(1.0, reduction="max")}

    def discard(self, *, adapter):
        self.discarded.append(adapter)

    def _metrics(self, batch, losses):
        tokens, places = batch.ragged("tokens"), batch.array(ADAPTER)
        owners = np.repeat(places, tokens.lengths)
        sums = {place: float(tokens.values[owners == place].sum()) for place in losses.losses}
        return {f"{place}/loss": Metric(value, reduction="sum") for place, value in sums.items()}


def rows(*lengths, token=1):
    tokens = Ragged.from_rows([np.full(length, token) for length in lengths], dtype=np.int32)
    return Batch({"tokens": tokens, "loss_mask": tokens.like(np.ones(sum(lengths), dtype=np.int8))})


def policy(**values):
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.1, "weight_decay": 0.5, "fused": False}}
    lora = {"enabled": True, "dim": 4, "alpha": 8, "max_adapters": 2}
    given = {"model_name": "x", "optimizer": optimizer, "lora_cfg": lora, "max_grad_norm": 2.0}
    return ModelConfig.model_validate({**given, **values})


class Runs:
    """Runs in threads of this process, each with its thread of the base."""

    def __init__(self, slots=2):
        self.model = NotedModel()
        self.base = SharedBase(self.model, slots)
        self.models, self.threads = {}, {}

    def open(self, name, **values):
        ours, theirs = Pipe()
        self.threads[name] = threading.Thread(target=self.base.serve, args=(ours, name), daemon=True)
        self.threads[name].start()
        model = AdapterModel(theirs, policy(**values), seed=3)
        model.components(None)
        self.models[name] = model
        return model

    def close(self, name):
        self.models[name]._connection.close()
        self.threads[name].join(30)
        assert not self.threads[name].is_alive()

    def at_once(self, **calls):
        """Return what calls in threads of their own return or raise, which the model begins when all have asked."""
        found = {}

        def make(name, call):
            try:
                found[name] = call()
            except Exception as error:  # noqa: BLE001
                found[name] = error

        threads = [threading.Thread(target=make, args=each) for each in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


def test_steps_of_runs_that_ask_together_are_one_pass_with_the_settings_of_each():
    runs = Runs()
    first, second = runs.open("first"), runs.open("second", max_grad_norm=None)
    for _ in range(3):
        found = runs.at_once(
            first=lambda: first.train_step(rows(2, 3), NLLLoss()),
            second=lambda: second.train_step(rows(4, token=5), NLLLoss()),
        )
    assert runs.model.passes[-1] == [0, 1]
    assert {name: each["loss"].value for name, each in found.items()} == {"first": 5.0, "second": 20.0}
    assert found["first"]["num_tokens"].value == 5
    assert found["first"]["grad_norm"].value == 1.0
    of_first = [step[1:] for step in runs.model.steps if step[0] == 0]
    assert of_first == [(pytest.approx(0.1 / n), 2.0, {"weight_decay": 0.5}) for n in (1, 2, 3)]
    assert {step[2] for step in runs.model.steps if step[0] == 1} == {None}
    assert runs.model.adapters.made[0] == AdapterSettings(4, 8, 3)


def test_rows_that_fail_cost_only_their_own_run_its_step():
    runs = Runs()
    first, second = runs.open("first"), runs.open("second")
    for token in (1, BAD, 1):
        found = runs.at_once(
            first=lambda: first.train_step(rows(2), NLLLoss()),
            second=lambda token=token: second.train_step(rows(3, token=token), NLLLoss()),
        )
        assert found["first"]["loss"].value == 2.0
        if token == BAD:
            assert isinstance(found["second"], RLError)
        else:
            assert found["second"]["loss"].value == 3.0
    assert [step[0] for step in runs.model.steps].count(0) == 3


def test_the_death_of_a_rank_reaches_all_runs_and_is_kept():
    runs = Runs()
    first, second = runs.open("first"), runs.open("second")
    runs.model.accumulate = lambda *_: (_ for _ in ()).throw(WorkerDied("rank 0 is gone"))
    found = runs.at_once(
        first=lambda: first.train_step(rows(2), NLLLoss()), second=lambda: second.train_step(rows(3), NLLLoss())
    )
    assert {type(each) for each in found.values()} == {WorkerDied}
    assert isinstance(runs.base.death, WorkerDied)


def test_nobody_waits_for_a_run_that_does_something_else_or_has_ended():
    runs = Runs()
    first, second = runs.open("first"), runs.open("second")
    runs.base._patience_s = 600.0
    runs.at_once(
        first=lambda: first.train_step(rows(2), NLLLoss()), second=lambda: second.train_step(rows(3), NLLLoss())
    )
    runs.base._patience_s = 600.0
    measured = second.evaluate(rows(3), NLLLoss())
    assert (measured["loss"].value, measured["num_tokens"].value) == (3.0, 3.0)
    assert runs.at_once(first=lambda: first.train_step(rows(2), NLLLoss()))["first"]["loss"].value == 2.0
    runs.base._patience_s = 600.0
    runs.close("second")
    assert runs.at_once(first=lambda: first.train_step(rows(2), NLLLoss()))["first"]["loss"].value == 2.0


def test_a_run_that_ends_leaves_its_place_to_another():
    runs = Runs()
    runs.open("first")
    runs.open("second")
    with pytest.raises(ValueError, match="all 2 places are taken"):
        runs.open("third")
    runs.close("first")
    assert runs.model.discarded == [0]
    third = runs.open("fourth")
    read = third.infer(rows(2), [LOGPROBS], reference=True)
    assert read.ragged("logprobs").values.tolist() == [0.0, 0.0]


def test_a_checkpoint_has_the_adapter_and_the_place_in_the_schedule(tmp_path):
    runs = Runs()
    model = runs.open("first")
    for _ in range(2):
        model.train_step(rows(2), NLLLoss())
    folder = tmp_path / "policy"
    folder.mkdir()
    model.save(str(folder), wait=False)
    files = model.finish_save()
    assert [file.path for file in files] == ["factors", "steps.json"]
    model.components(None)
    assert model.train_step(rows(2), NLLLoss())["loss"].value == 2.0
    assert runs.model.steps[-1][1] == pytest.approx(0.1)  # the first of a new adapter
    model.load(str(folder), files=files)
    assert runs.model.adapters.loaded == [(0, str(folder), True, ("factors", "steps.json"))]
    model.train_step(rows(2), NLLLoss())
    assert runs.model.steps[-1][1] == pytest.approx(0.1 / 3)
    (folder / "steps.json").write_text("{")
    with pytest.raises(CheckpointDamaged, match=r"steps\.json"):
        model.load(str(folder))
    model.export(str(tmp_path / "hf"))
    model.export_adapter(str(tmp_path / "adapter"))
    assert runs.model.adapters.exported == [(0, True), (0, False)]


def test_the_end_of_the_base_is_told_with_the_remedy():
    ours, theirs = Pipe()
    model = AdapterModel(theirs, policy(), seed=0)
    ours.close()
    with pytest.raises(RLError, match="run the same command again to resume"):
        model.components(None)
    with pytest.raises(ValueError, match="no others"):
        _ = model.adapters
    with pytest.raises(ValueError, match="cannot move"):
        model.update_reference()


def test_pairs_of_different_runs_stay_apart():
    places = AdapterPlaces(NotedModel(), 2)
    for name in ("first", "second"):
        places.create(name, AdapterSettings(1, 1))
    pairs = rows(1, 1, 1, 1).with_columns({"pair": np.array([0, 0, 1, 1])})
    batch, losses = places._joined([AdapterWork(name, pairs, NLLLoss()) for name in ("first", "second")])
    assert batch.array("pair").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(losses.losses) == [0, 1]


@pytest.mark.parametrize(
    ("changed", "is_shared"),
    [
        ({"max_grad_norm": 7.0}, True),
        ({"train_global_batch_size": 64}, True),
        ({"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3.0, "fused": False}}}, True),
        ({"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.1, "fused": True}}}, False),
        ({"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}}, False),
        ({"lora_cfg": {"enabled": True, "dim": 2, "alpha": 1, "max_adapters": 2}}, True),
        ({"lora_cfg": {"enabled": True, "dim": 4, "exclude_modules": ["o_proj"], "max_adapters": 2}}, False),
        ({"model_name": "y"}, False),
        ({"precision": "float32"}, False),
    ],
)
def test_runs_share_a_base_if_only_their_adapters_and_steps_differ(changed, is_shared):
    keys = [base_key(policy(**values), {"algorithm": "sft"}) for values in ({}, changed)]
    assert (keys[0] == keys[1]) is is_shared
    assert json.loads(keys[0])[1] == {"algorithm": "sft"}
