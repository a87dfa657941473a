"""The share of a GPU that an engine takes, by what the GPU and the placement leave."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.errors import GeneratorError
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.torch.reference_model import write_reference_model
from rl_core.usage.meter import Gpus, GpuUsage
from rl_vllm import VllmConfig
from rl_vllm.engine import memory
from rl_vllm.engine.memory import GIB, memory_share

Share = Callable[..., float]


def gpu(index: int, used: float, total: float = 80) -> GpuUsage:
    return GpuUsage(index, f"GPU-{index}", None, int(used * GIB), int(total * GIB), None, None)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Share:
    """The share of an engine whose policy sends tensors of these GiB."""

    def of(placement: Placement, *gpus: GpuUsage, sizes: tuple[float, ...] = (), **settings: object) -> float:
        monkeypatch.setattr(Gpus, "read", lambda _: gpus)
        monkeypatch.setattr(memory, "sent_bytes", lambda _: [int(size * GIB) for size in sizes])
        return memory_share(VllmConfig(**settings), ModelConfig(model_name=str(tmp_path)), placement)

    return of


ALONE = Placement("cuda", awaits_weights=True)
SHARED = Placement("cuda", shares_devices=True, awaits_weights=True)


def test_an_engine_alone_leaves_room_for_the_transfers_of_large_tensors(share: Share) -> None:
    small = share(ALONE, gpu(0, 0.5), sizes=(0.1, 0.2))
    assert small == 0.9
    # Two buffers, the layer that is filled, and the whole that its parts are put into.
    alone = share(ALONE, gpu(0, 0.5), sizes=(4, 2))
    assert alone == pytest.approx(1 - (0.5 + 1 + 3 * 4) / 80)
    assert share(ALONE, gpu(0, 0.5), sizes=(4, 2), tensor_parallel_size=2) == pytest.approx(alone - 4 / 80)
    assert share(Placement("cuda"), gpu(0, 0.5), sizes=(4, 2)) == 0.9, "weights from files are not transferred"


def test_an_engine_takes_what_the_policy_leaves_it(share: Share) -> None:
    assert share(SHARED, gpu(0, 1.5)) == 0.85
    assert share(SHARED, gpu(0, 1, total=24)) == pytest.approx(1 - (1 + 1 + 4) / 24)
    assert share(SHARED, gpu(0, 0), gpu(1, 10), gpu(2, 2)) == pytest.approx(1 - 15 / 80), "the fullest GPU decides"


def test_only_the_gpus_of_the_replica_count(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    full, free = gpu(0, 79), gpu(1, 1)
    for visible in ("1", "GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert share(SHARED, full, free) == 0.85


def test_a_value_of_the_user_wins(share: Share) -> None:
    for placement in (ALONE, SHARED):
        assert share(placement, gpu(0, 30), gpu_memory_utilization=0.4) == 0.4
        assert share(placement, gpu_memory_utilization=0.4) == 0.4


def test_several_engines_on_a_gpu_have_equal_shares_whichever_starts_first(share: Share) -> None:
    several = Placement("cuda", num_engines=3)
    assert share(several, gpu(0, 0.5)) == share(several, gpu(0, 2 * 0.3 * 80 + 1.5)) == pytest.approx(0.3)
    assert share(several, gpu(0, 0.5), gpu_memory_utilization=0.6) == pytest.approx(0.2)


def test_weights_that_fill_the_share_are_refused_before_vllm_starts(share: Share) -> None:
    large = (2.0,) * 40
    with pytest.raises(GeneratorError, match=r"80\.0 GiB of each GPU.*Increase vllm_cfg\.tensor_parallel_size"):
        share(SHARED, gpu(0, 1), sizes=large)
    assert share(SHARED, gpu(0, 1), sizes=large, tensor_parallel_size=4) == 0.85
    assert share(SHARED, gpu(0, 1), sizes=large, kv_cache_gib=1) == 0.85, "vLLM then takes the share as no limit"
    with pytest.raises(GeneratorError, match=r"0\.00 of 80\.0 GiB \(78\.0 GiB in use, 5\.0 GiB reserved\)"):
        share(SHARED, gpu(0, 78))


def test_the_log_shows_the_numbers(share: Share, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        share(SHARED, gpu(0, 1.5), sizes=(1.2,))
        share(ALONE, gpu(0, 0.5), sizes=(4,))
        share(ALONE, gpu(0, 0.5), sizes=(4,), gpu_memory_utilization=0.9)
    assert "0.85 of 80.0 GiB (1.5 GiB in use, 5.0 GiB reserved) of each GPU, which leaves 10.5 GiB" in caplog.text
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "WARNING"], "transfers need 13 GiB, and the user left 7.5"


@pytest.mark.parametrize("device", ["cpu", "rehearsal", "cuda"])
def test_memory_that_cannot_be_read_leaves_the_safe_shares(share: Share, device: str) -> None:
    assert share(Placement(device)) == 0.9
    assert share(Placement(device, shares_devices=True)) == 0.6


def test_the_sizes_are_those_of_the_tensors_that_a_policy_sends(tmp_path: Path) -> None:
    model = ModelConfig(model_name=str(write_reference_model(tmp_path / "model", seed=0)), precision="bfloat16")
    files = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert sum(memory.sent_bytes(model)) == pytest.approx(files / 2, rel=0.05), "the files are in float32"
    assert memory.sent_bytes(ModelConfig(model_name=str(tmp_path))) == []
