"""The self-check goes through its cases and tells one verdict from another; the backends' suites train for real."""

import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from rl_core.errors import WorkerDied, WorkerError
from rl_core.selfcheck.torch import selfcheck
from rl_core.selfcheck.torch.selfcheck import (
    NUM_STEPS,
    Expected,
    SelfCheck,
    all_cases,
    case_on,
    read_files,
    write_random,
)
from rl_core.selfcheck.torch.tiny_model import SIZES

LAYOUTS = {"1": (1, {}), "tp2": (2, {"tp": 2})}
CASE = case_on(LAYOUTS, "1", is_packed=True, has_adapters=False)


@pytest.fixture
def folder(tmp_path):
    return write_random(AutoConfig.for_model("qwen3", **SIZES), tmp_path / "model")


class FakeModel:
    """Stands in for a model on a mesh; every step reports the same loss."""

    loss = 1.0
    failure = None

    def __init__(self, pool, factory, config, spec, num_ranks, **settings):
        if self.failure is not None:
            raise self.failure

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def train_step(self, batch, loss):
        return {"loss": self.loss, "grad_norm": 1.0}


def checked(monkeypatch, folder, weights=None, **told):
    """The verdict on a model that behaves as told, and sends these weights."""
    monkeypatch.setattr(selfcheck, "PooledModel", type("Model", (FakeModel,), told))
    sent = read_files(folder) if weights is None else weights
    expected = Expected(({"loss": 1.0, "grad_norm": 1.0},) * NUM_STEPS, read_files(folder))
    return SelfCheck("somewhere:build", lambda model: sent).check_case(None, folder, CASE, expected)


def test_a_model_that_does_as_one_process_is_exact(monkeypatch, folder):
    found = checked(monkeypatch, folder)
    assert (found.mesh, found.layout, found.verdict) == ("1", "packed, full", "exact")
    assert found.differences == {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}


@pytest.mark.parametrize("loss", [1.001, math.nan])
def test_a_loss_that_differs_is_off(monkeypatch, folder, loss):
    assert checked(monkeypatch, folder, loss=loss).verdict == "off"


@pytest.mark.parametrize(("steepness", "verdict"), [(1.0, "off"), (60.0, "exact")])
def test_a_difference_is_rounding_only_if_float32_makes_as_large_a_one_in_one_process(
    monkeypatch, folder, steepness, verdict
):
    # scores so steep that which token attention is paid to hangs on their last bits
    weights = {name: weight * steepness if "q_norm" in name else weight for name, weight in read_files(folder).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    expected = SelfCheck("somewhere:build", lambda model: {}).expect(folder, has_adapters=False)
    off_by = 3e-5

    class Model(FakeModel):
        steps = iter(expected.steps)

        def train_step(self, batch, loss):
            step = next(self.steps)
            return {**step, "grad_norm": step["grad_norm"] + off_by * max(1.0, step["grad_norm"])}

    monkeypatch.setattr(selfcheck, "PooledModel", Model)
    sent = iter([weights, expected.weights])
    found = SelfCheck("somewhere:build", lambda model: next(sent)).check_case(None, folder, CASE, expected)
    assert found.verdict == verdict
    assert found.differences["grad_norm"] == pytest.approx(off_by, rel=1e-3)
    assert ("transformers in float32 differs" in found.reason) == (verdict == "exact")


def test_a_weight_that_is_missing_or_moved_is_off_and_named(monkeypatch, folder):
    weights = read_files(folder)
    name, other = list(weights)[:2]
    moved = checked(monkeypatch, folder, {**weights, name: weights[name] + torch.finfo(torch.float32).eps})
    assert (moved.verdict, moved.names) == ("off", (name,))
    missing = checked(monkeypatch, folder, {key: value for key, value in weights.items() if key != other})
    assert (missing.verdict, missing.names) == ("off", (other,))
    assert missing.differences["weights"] == math.inf


@pytest.mark.parametrize(
    ("failure", "verdict", "reason"),
    [
        (WorkerError("builtins.ValueError", "cannot be cut", "far away"), "refused", "cannot be cut"),
        (WorkerError("builtins.RuntimeError", "shapes differ", "far away"), "off", "RuntimeError: shapes differ"),
        (WorkerDied("rank 1 died"), "off", "rank 1 died"),
    ],
)
def test_a_rank_that_refuses_is_told_from_one_that_fails(monkeypatch, folder, failure, verdict, reason):
    found = checked(monkeypatch, folder, failure=failure)
    assert found.verdict == verdict
    assert reason in found.reason


def test_a_family_that_one_process_cannot_train_is_refused_case_by_case(monkeypatch, folder):
    def adapt(model, config):
        raise ValueError("no linear layers")

    monkeypatch.setattr(selfcheck, "adapt", adapt)
    monkeypatch.setattr(selfcheck, "PooledModel", FakeModel)
    check = SelfCheck("somewhere:build", lambda model: read_files(folder))
    found = list(check.check_family(None, folder, all_cases(LAYOUTS)))
    assert [each.layout for each in found] == ["packed, full", "padded, full", "packed, adapters"] * 2
    refused = [each for each in found if each.verdict == "refused"]
    assert {each.layout for each in refused} == {"packed, adapters"}
    assert all("in one process, in float64: no linear layers" in each.reason for each in refused)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_adapters_of_one_process_train_alone_and_are_merged(tmp_path, family):
    sizes = SIZES if family == "qwen3" else {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 101}
    folder = write_random(AutoConfig.for_model(family, **sizes), tmp_path / "model")
    expected = SelfCheck("somewhere:build", lambda model: {}).expect(folder, has_adapters=True)
    before = read_files(folder)
    moved = {name for name, weight in expected.weights.items() if not torch.equal(weight.float(), before[name])}
    assert moved
    assert all(name.endswith("weight") and before[name].dim() == 2 for name in moved)
    assert not any("embed" in name or "wte" in name or "wpe" in name or "norm" in name for name in moved)
