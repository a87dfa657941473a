"""Training steps on several GPUs, with NCCL between them: each mesh against float64 in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from gpu_check.report import Report
from gpu_check.runner import is_importable
from gpu_check.setup import Setup
from rl_core.plugins import MeshCase
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_core.selfcheck.torch.selfcheck import SelfCheck, case_on, read_files

ORACLE = "transformers in float64, in one process"
DENSE, ROUTED = "qwen3", "qwen3_moe"


@dataclass(frozen=True)
class Kind:
    """A mesh of a backend and the model that is trained on it.

    Args:
        family: Model type.
        mesh: name of the mesh in the backend's self-check.
        has_adapters: whether adapters train.
        further: further settings of the backend.
        name: Name of the further settings, for the report.
    """

    family: str
    mesh: str
    has_adapters: bool = False
    further: Mapping[str, Any] | None = None
    name: str = ""


@dataclass(frozen=True)
class Backend:
    """A backend's self-check, with the kinds to run; the first two are those of a small check."""

    package: str
    meshes: Mapping[str, tuple[int, Mapping[str, Any]]]
    check: SelfCheck
    write: Callable[[PreTrainedConfig, Path], Path]
    kinds: Sequence[Kind]


def check(setup: Setup, report: Report) -> None:
    """Check both backends."""
    if setup.num_gpus < 2:
        report.skip("meshes", "they need several GPUs: --gpus 2")
        return
    found = {module: load for module, load in BACKENDS.items() if is_importable(module)}
    preload(*found)
    with RankPool(setup.num_gpus, device=setup.device) as pool:
        for module in BACKENDS:
            package = module.partition(".")[0]
            if module not in found:
                report.skip(package, f"{module} cannot be imported")
                continue
            with report.attempt(package):
                check_backend(found[module](), pool, setup, report)


def check_backend(backend: Backend, pool: RankPool, setup: Setup, report: Report) -> None:
    """Check every kind of mesh that there are enough GPUs for."""
    kinds = backend.kinds[: setup.pick(2, len(backend.kinds))]
    # weights are read from files: a receiver in this process would need a GPU of its own
    selfcheck = replace(backend.check, weights_of=exported)
    for kind in kinds:
        case = case_on(backend.meshes, kind.mesh, is_packed=True, has_adapters=kind.has_adapters)
        case = replace(case, settings={**case.settings, **(kind.further or {})})
        subject = ", ".join(filter(None, (backend.package, kind.family, str(case), kind.name)))
        if case.num_ranks > setup.num_gpus:
            report.skip(subject, f"needs --gpus {case.num_ranks}")
            continue
        with report.attempt(subject):
            _check_case(pool, selfcheck, _folder(backend, kind.family, setup), case, subject, report)


def _check_case(
    pool: RankPool, selfcheck: SelfCheck, folder: Path, case: MeshCase, subject: str, report: Report
) -> None:
    (found,) = selfcheck.check_family(pool, folder, [case])
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in found.differences.items())
    wrong = f"not as in the files: {', '.join(found.names)}" if found.names else ""
    text = "; ".join(filter(None, (shown, wrong, found.reason)))
    report.holds(subject, ORACLE, found.verdict == "exact", text)


def exported(model: PooledModel) -> dict[str, Tensor]:
    """Return the weights that a model exports."""
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder)
        return read_files(Path(folder))


def _folder(backend: Backend, family: str, setup: Setup) -> Path:
    folder = setup.workspace / f"{backend.package}-{family}"
    if not (folder / "config.json").exists():
        fields = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True} if family == ROUTED else {}
        backend.write(AutoConfig.for_model(family, **fields), folder)
    return folder


def dtensor() -> Backend:
    """Return rl-dtensor with its kinds of meshes."""
    from rl_dtensor.selfcheck import CHECK, MESHES, write_tiny

    kinds = (
        Kind(DENSE, "tp2+sp", has_adapters=True),
        Kind(ROUTED, "fsdp2"),
        Kind(DENSE, "fsdp2"),
        Kind(
            DENSE, "tp2", further={"compile": True, "recompute": "selective"}, name="compiled, recomputed selectively"
        ),
        Kind(DENSE, "fsdp2", further={"reshard_after": "step"}, name="gathered once a step"),
        Kind(DENSE, "tp2"),
        Kind(DENSE, "cp2"),
        Kind(DENSE, "cp2 ulysses"),
        Kind(DENSE, "pp2"),
        Kind(DENSE, "hsdp 2x2"),
        Kind(DENSE, "cp2 x tp2"),
        Kind(ROUTED, "ep2 x fsdp2"),
        Kind(ROUTED, "ep2 x fsdp2", further={"expert_chunks": 2}, name="tokens in two chunks"),
        Kind(ROUTED, "ep2 x fsdp2", further={"tensor_parallel_size": 2}, name="tensor-parallel too"),
    )
    return Backend("rl_dtensor", MESHES, CHECK, write_tiny, kinds)


def megatron() -> Backend:
    """Return rl-megatron with its kinds of meshes, on layers of Transformer Engine if they are installed, unless a kind
    sets otherwise."""
    from rl_megatron.selfcheck import CHECK, LAYOUTS, write_tiny

    kinds = (
        Kind(DENSE, "tp2+sp"),
        Kind(ROUTED, "ep2"),
        Kind(DENSE, "tp2+sp", has_adapters=True),
        Kind(DENSE, "dp2", further={"transformer_engine": False}, name="local layers"),
        Kind(DENSE, "dp2"),
        Kind(ROUTED, "ep2", further={"transformer_engine": False}, name="local layers"),
        Kind(DENSE, "pp2"),
        Kind(DENSE, "pp2 virtual"),
        Kind(DENSE, "cp2"),
        Kind(DENSE, "tp2+sp x pp2"),
        Kind(ROUTED, "tp2+sp x ep2"),
    )
    return Backend("rl_megatron", LAYOUTS, CHECK, write_tiny, kinds)


BACKENDS: Mapping[str, Callable[[], Backend]] = {"rl_dtensor.worker": dtensor, "rl_megatron.worker": megatron}
"""Backends by the module that their ranks import."""
