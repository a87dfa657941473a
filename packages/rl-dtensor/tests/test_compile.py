"""Compiled layers compute what the others do."""

import pytest
from transformers import AutoConfig

from rl_core.selfcheck.torch.selfcheck import case_on
from rl_core.testing.exhaustive import partly_exhaustive
from rl_dtensor import preflight
from rl_dtensor.model.compilation import compiler_problem
from rl_dtensor.selfcheck import CHECK, MESHES, write_tiny

GRAPHS = "aot_eager_decomp_partition"
"""A backend that traces, guards, decomposes and partitions as inductor does, and runs the graphs without g++, which
takes most of inductor's time."""
RECOMPUTING = {"compile": True, "recompute": "full"}


# on one rank too FSDP gathers what the compiled layers read
@pytest.mark.parametrize(
    ("backend", "num_ranks"), partly_exhaustive([(GRAPHS, 1), (GRAPHS, 2), ("inductor", 2)], always=[(GRAPHS, 1)])
)
def test_compiled_layers_train_and_stream_as_one_process(ranks, tmp_path, monkeypatch, backend, num_ranks):
    ranks.run("dtensor_factories:compile_by", [(backend,)] * num_ranks)
    monkeypatch.setitem(MESHES, "compiled", (num_ranks, RECOMPUTING))
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    case = case_on(MESHES, "compiled", is_packed=True, has_adapters=False)
    outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=False))
    assert outcome.verdict == "exact", outcome
    graphs = ranks.run("dtensor_factories:count_compiled", [()] * num_ranks)
    # with and without gradients, and once for rows of all lengths
    assert all(2 <= count <= 16 for count in graphs), graphs


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
