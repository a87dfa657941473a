"""The queues that runs can be submitted to."""

from __future__ import annotations

from collections.abc import Mapping

from rl_launch.submit.kubernetes.target import KubernetesTarget
from rl_launch.submit.slurm.target import SlurmTarget
from rl_launch.submit.target import Target

TARGETS: Mapping[str, Target] = {target.name: target for target in (SlurmTarget(), KubernetesTarget())}
"""Every target by name."""
