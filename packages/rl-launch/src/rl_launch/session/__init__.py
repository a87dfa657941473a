"""Run sessions: the directory of a run and all that is written into it."""

from rl_launch.session.checkpoints import ADAPTER, EXPORT, newest_checkpoint
from rl_launch.session.config import CheckpointingConfig, LoggerConfig
from rl_launch.session.log_output import show_logs
from rl_launch.session.run_directory import RunDirectory
from rl_launch.session.session import RunSession

__all__ = [
    "ADAPTER",
    "EXPORT",
    "CheckpointingConfig",
    "LoggerConfig",
    "RunDirectory",
    "RunSession",
    "newest_checkpoint",
    "show_logs",
]
