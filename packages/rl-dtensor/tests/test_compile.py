"""Compiled layers compute what the others do."""

import pytest
from transformers import AutoConfig

from rl_core.selfcheck.torch.selfcheck import case_on
from rl_core.testing.exhaustive import partly_exhaustive
from rl_dtensor import preflight
from rl_dtensor.model.layers.compilation import compiler_problem
from rl_dtensor.selfcheck import CHECK, MESHES, write_tiny

GRAPHS = "aot_eager_decomp_partition"
"""A backend that traces, guards, decomposes and partitions as inductor does, and runs the graphs without g++, which
takes most of inductor's time."""
MIXTURE = "qwen3_moe"
CASES = [
    (backend, family, mesh, recompute)
    for backend in (GRAPHS, "inductor")
    for family, mesh, recompute in (
        ("qwen3", "tp2+sp", "selective"),
        ("qwen3", "tp2", "selective"),
        ("qwen3", "cp2", "selective"),
        ("qwen3", "cp2 ulysses", "full"),
        ("qwen3", "pp2", "selective"),
        ("qwen3", "fsdp2", "none"),
        ("gemma2", "tp2 x fsdp2", "selective"),
        (MIXTURE, "tp2", "selective"),
        (MIXTURE, "ep2 x fsdp2", "selective"),
        (MIXTURE, "ep2 x fsdp2", "none"),
    )
]
"""Backend, family, mesh, recomputation."""


@pytest.mark.parametrize(("backend", "family", "mesh", "recompute"), partly_exhaustive(CASES, always=[]))
def test_compiled_layers_train_and_stream_as_one_process(
    ranks, tmp_path, monkeypatch, backend, family, mesh, recompute
):
    num_ranks, sizes = MESHES[mesh]
    monkeypatch.setitem(MESHES, mesh, (num_ranks, {**sizes, "compile": True, "recompute": recompute}))
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=False)
    ranks.run("dtensor_factories:compile_by", [(backend,)] * num_ranks)
    outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=False))
    graphs = ranks.run("dtensor_factories:count_compiled", [()] * num_ranks)
    assert outcome.verdict == "exact", outcome
    # up to six parts, with and without gradients, and those of a rank's single token; no more for other lengths
    assert all(0 < count <= 20 for count in graphs), graphs


def test_a_machine_without_a_compiler_is_told_before_the_run(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(preflight, "compiler_problem", compiler_problem.__wrapped__)
    policy = {"model_name": "m", "dtensor_cfg": {"compile": True}}
    problems = preflight.check(policy)
    assert len(problems) == 1
    assert problems[0].startswith("dtensor_cfg.compile needs a C++ compiler")
    assert "compile=false" in problems[0]
    assert not preflight.check({**policy, "dtensor_cfg": {}})
