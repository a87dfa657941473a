"""The environments of a run's workers on the driver's node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_launch.worker_envs.provision import Mode, provision
from rl_launch.worker_envs.spec import WorkerEnvSpec


@dataclass(frozen=True)
class DriverEnvs:
    """Interpreters of a run's workers on the driver's node: built, checked, and able to run the code sent to them.

    Args:
        mode: `cluster.worker_envs`.
        specs: Specs, by role: `policy`, `generation`, `env.<name>`.
        interpreters: Interpreter by role.
    """

    mode: Mode
    specs: Mapping[str, WorkerEnvSpec]
    interpreters: Mapping[str, str]

    @classmethod
    def provided(cls, specs: Mapping[str, WorkerEnvSpec], mode: Mode) -> DriverEnvs:
        """Find or build all of them; raises as `provision`."""
        found = provision(specs.values(), mode)
        return cls(mode, dict(specs), {role: found[spec] for role, spec in specs.items()})
