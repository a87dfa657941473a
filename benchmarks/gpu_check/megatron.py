"""rl-megatron's worker on one rank, on megatron-core's local layers and on Transformer Engine's."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from gpu_check.report import Report
from gpu_check.residency import check_rounds
from gpu_check.resume import check_resume
from gpu_check.setup import Setup
from gpu_check.training import Case, check_parity, check_shapes

CASES = (Case("packed", {"recompute": "none"}), Case("packed", {"recompute": "full"}))
LOCAL = {"transformer_engine": False}
"""Settings of models without Transformer Engine, which they use wherever it is installed."""
ROUNDS = 10


def check(setup: Setup, report: Report) -> None:
    """Check each kind of layers that can be built here."""
    from rl_megatron.engine_names import name_problems
    from rl_megatron.plugin import PLUGIN

    check_parity(PLUGIN, setup, report, "local layers, ", **LOCAL)
    local = tuple(replace(case, settings={**case.settings, **LOCAL}) for case in CASES)
    check_shapes(PLUGIN, setup, report, local, "local layers, ")
    if find_spec("transformer_engine") is None:
        report.skip("Transformer Engine's layers", "transformer_engine is not installed")
    elif not setup.kind.runs_on_gpus:
        report.skip("Transformer Engine's layers", "they run on GPUs")
    else:
        missing = list(name_problems({}))
        report.holds("names of Transformer Engine", "those that megatron-core imports", not missing, "; ".join(missing))
        check_parity(PLUGIN, setup, report, "Transformer Engine, ")
        check_shapes(PLUGIN, setup, report, CASES, "Transformer Engine, ")
    with report.attempt("residency"):
        check_rounds(PLUGIN, setup, report, ROUNDS)
    with report.attempt("resume"):
        check_resume(PLUGIN, setup, report)
