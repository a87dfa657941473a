"""Worker environments: the packages that each worker needs, and an interpreter that has them."""

from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.engine_checks import engine_problems
from rl_launch.worker_envs.node_build import BuiltEnv, EnvPlan, build, default_root
from rl_launch.worker_envs.plan import local_plan, portable_plan
from rl_launch.worker_envs.provision import Availability, Mode, availability_of, check_home, homes, provision
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, Wanted, WorkerEnvSpec, worker_env
from rl_launch.worker_envs.variables import chosen_variables, worker_variables

__all__ = [
    "ROLLOUT_WORKER",
    "Availability",
    "BuiltEnv",
    "EnvPlan",
    "Mode",
    "Wanted",
    "WorkerEnvSpec",
    "availability_of",
    "build",
    "check_home",
    "chosen_variables",
    "default_root",
    "engine_problems",
    "homes",
    "local_plan",
    "missing",
    "portable_plan",
    "provision",
    "worker_env",
    "worker_variables",
]
