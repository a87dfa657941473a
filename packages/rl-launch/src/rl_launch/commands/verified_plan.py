"""The plan of a training step beside what a backend counts on the real layers, in its worker's environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_algos.requirement import LOSSES
from rl_core.config import plain
from rl_core.errors import ConfigError
from rl_core.model_config import BackendConfig, EngineConfig, ModelConfig
from rl_launch.backends import ModelBackend
from rl_launch.doctor.family import worker_answers
from rl_launch.planning.memory import IMAGES, Recomputed, activation_bytes
from rl_launch.planning.plan import Plan, RolePlan, fields_of
from rl_launch.run_config.plan import RunPlan
from rl_launch.worker_envs.provision import provision
from rl_launch.worker_envs.spec import worker_env

ACTIVATIONS = "activations"
CLOSE = 0.1
"""Largest difference between plan and count that is not remarked on."""
_COUNT = """
import json, sys
from rl_core import resolve
found = resolve(sys.argv[1])(*json.loads(sys.argv[2]))
print("\\ncounted " + json.dumps(found), flush=True)
"""
_NAMES = {"gathered layers and their gradients": "gathered layers"}


@dataclass(frozen=True)
class Verified:
    """A part of a rank's memory.

    Args:
        role: Role of the model.
        part: Name of the part.
        planned: Bytes by formula.
        counted: Bytes on the real layers; None if they cannot be counted there.
    """

    role: str
    part: str
    planned: float
    counted: float | None

    @property
    def difference(self) -> float:
        """Planned over counted, less 1."""
        return self.planned / self.counted - 1 if self.counted else 0.0


def verify(run: RunPlan, plan: Plan) -> list[Verified]:
    """Count the ranks of every model whose backend can, and return each part beside its plan.

    Layers are counted as a CPU runs them, without fused kernels, so that the plan is made for that too.

    Raises:
        ConfigError: If no backend of the run counts, or no model has known layers.
        WorkerEnvironmentError: If a backend's environment is unavailable.
        RLError: If a count does not finish.
    """
    found: list[Verified] = []
    for role in plan.roles:
        found += _of_role(run, role)
    if not found:
        backends = ", ".join(sorted({model.plugin.name for model in run.backends.models.values()}))
        raise ConfigError(
            f"--verify: the backend {backends} does not count on real layers, or the layers of the models are not known"
        )
    return found


def _of_role(run: RunPlan, role: RolePlan) -> Iterator[Verified]:
    model = run.backends.models[role.role]
    rank = role.rank
    if not model.plugin.counted or rank is None or rank.shape is None:
        return
    # The language model of some families cannot be built without the vision tower, which is not counted.
    counted = {} if rank.vision is not None else _counted(model, role.ranks)
    unfused = replace(rank, layout=replace(rank.layout, is_fused=False))
    planned = unfused.besides_activations(None)
    layers = rank.layers
    for name, each in (
        ("none", Recomputed(0, 0, layers)),
        ("selective", Recomputed(0, layers, layers)),
        ("full", Recomputed(layers, 0, layers)),
    ):
        tokens = rank.microbatch(training=True)
        size = activation_bytes(rank.shape, unfused.layout, rank.model, each, tokens=tokens)
        planned[f"{ACTIVATIONS}, recompute {name}"] = size
    by_part = {_NAMES.get(name, name): size for name, size in counted.items()}
    if rank.model.lora_cfg.enabled:
        # Adapters are not on the layers that are counted, and change what these keep.
        by_part = {part: size for part, size in by_part.items() if not part.startswith(ACTIVATIONS)}
    for part, size in planned.items():
        yield Verified(role.role, part, size, by_part.get(part))
    if rank.vision is not None:
        yield Verified(role.role, IMAGES, rank.images(Recomputed(0, 0, layers)), None)


def _counted(model: ModelBackend, ranks: int) -> dict[str, float]:
    """Return the bytes that the worker's environment counts, by part."""
    fields, _ = fields_of(model.config)
    spec = worker_env(model.plugin.requirement, "cpu", also=(LOSSES,))
    given = json.dumps([_shared(model.config), plain(model.backend), fields, ranks])
    answers = dict(worker_answers(provision([spec])[spec], _COUNT, model.plugin.counted, given, what="--verify"))
    found: dict[str, float] = json.loads(answers["counted"])
    return found


def _shared(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that every backend has, as plain data."""
    kinds = (BackendConfig, EngineConfig)
    names = [name for name in ModelConfig.model_fields if not isinstance(getattr(config, name), kinds)]
    return {name: value for name, value in plain(config).items() if name in names}


def lines(found: Sequence[Verified]) -> Iterator[str]:
    """Yield the parts as lines of text, those that differ with a mark."""
    yield ""
    yield "Counted on the real layers, GB (planned without fused kernels):"
    yield f"  {'':<44} {'counted':>9} {'planned':>9}"
    for each in found:
        name, size = f"{each.role}, {each.part}", "not" if each.counted is None else f"{each.counted / 1e9:.3g}"
        mark = "" if each.counted is None else f" {each.difference:>+7.1%}"
        mark += "  differs" if abs(each.difference) > CLOSE else ""
        yield f"  {name:<44} {size:>9} {each.planned / 1e9:>9.3g}{mark}"
