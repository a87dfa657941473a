from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from rl_core.devices import DEVICES, NODE_ADDRESS
from rl_core.rollouts.generation import Placement
from rl_vllm.engine import process_env


def test_a_replica_on_gpus_keeps_the_gpus_that_it_was_shown() -> None:
    found = process_env.variables(Placement("cuda"))
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert "TORCHDYNAMO_DISABLE" not in found
    assert not [name for name in found if name.startswith("VLLM_CPU")]


def test_a_replica_on_gpus_without_flashinfer_logs_which_kernels_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_env, "bytecode_folder", lambda environ: None)
    for device in ("cpu", "cuda"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            process_env.apply(Placement(device), eager=True, num_ranks=1, own_process=False, environ={})
        assert ("FlashInfer is not in this environment" in caplog.text) == (device == "cuda")


def test_ranks_meet_at_the_address_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_ADDRESS, raising=False)
    assert process_env.variables(Placement("cuda"))["VLLM_HOST_IP"] == "127.0.0.1"
    monkeypatch.setenv(NODE_ADDRESS, "10.0.0.7")
    assert process_env.variables(Placement("cuda"))["VLLM_HOST_IP"] == "10.0.0.7"


def test_a_replica_on_cpu_uses_its_share_of_threads_and_hides_no_gpu() -> None:
    found = process_env.variables(Placement("cpu", cpu_threads=3))
    assert found["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_the_sampler_compiles_nothing_in_an_eager_replica_on_cpu() -> None:
    assert process_env.import_variables(DEVICES["cpu"], eager=True)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in process_env.import_variables(DEVICES["cpu"], eager=False)
    assert "TORCHDYNAMO_DISABLE" not in process_env.import_variables(DEVICES["cuda"], eager=True)


def test_what_the_user_set_stays_where_it_is_theirs_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_env, "bytecode_folder", lambda environ: None)
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_HUB_OFFLINE": "1"}
    process_env.apply(Placement("cpu"), eager=True, num_ranks=1, own_process=False, environ=environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    process_env.apply(Placement("cuda"), eager=True, num_ranks=1, own_process=False, environ=(on_gpus := {}))
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in on_gpus


@pytest.mark.parametrize(
    ("device", "num_ranks", "own_process", "expected"),
    [
        ("cpu", 1, False, "0"),
        ("cpu", 1, True, "0"),
        ("cpu", 2, True, "1"),
        ("cuda", 1, True, "1"),
        ("cuda", 1, False, "0"),
    ],
)
def test_ranks_get_processes_where_the_engine_has_some(
    monkeypatch: pytest.MonkeyPatch, device: str, num_ranks: int, own_process: bool, expected: str
) -> None:
    monkeypatch.setattr(process_env, "bytecode_folder", lambda environ: None)
    environ: dict[str, str] = {}
    process_env.apply(Placement(device), eager=True, num_ranks=num_ranks, own_process=own_process, environ=environ)
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == expected


def test_bytecode_goes_to_the_cache_only_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    spec = type("Spec", (), {"origin": str(package)})
    monkeypatch.setattr(process_env.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert process_env.bytecode_folder(environ) == tmp_path / "cache" / "rl-vllm" / "bytecode"
    compiled = Path(process_env.importlib.util.cache_from_source(str(package)))
    compiled.parent.mkdir()
    compiled.write_bytes(b"")
    assert process_env.bytecode_folder(environ) is None


def test_engines_that_quantise_leave_out_the_kernels_that_quantise_twice() -> None:
    for chosen, expected in (({}, "0"), ({"VLLM_USE_DEEP_GEMM": "1"}, "1")):
        environ = dict(chosen)
        process_env.apply(
            Placement("cuda"), eager=True, num_ranks=1, own_process=False, environ=environ, quantises=True
        )
        assert environ["VLLM_USE_DEEP_GEMM"] == expected
