"""Run sessions: the directory of a run and all that is written into it."""

from rl_launch.run_session.checkpoints.checkpoints import ADAPTER, EXPORT, newest_checkpoint
from rl_launch.run_session.config import CheckpointingConfig, LoggerConfig, ProfilingConfig
from rl_launch.run_session.directory.run_directory import RunDirectory
from rl_launch.run_session.session import RunSession
from rl_launch.run_session.tracking.log_output import show_logs

__all__ = [
    "ADAPTER",
    "EXPORT",
    "CheckpointingConfig",
    "LoggerConfig",
    "ProfilingConfig",
    "RunDirectory",
    "RunSession",
    "newest_checkpoint",
    "show_logs",
]
