"""`rl push`: one checkpoint of a run, pushed to the hub, an object store or a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl_core.errors import ConfigError
from rl_launch.push.destinations import destination_of
from rl_launch.push.staging import stage
from rl_launch.session.checkpoints.checkpoints import ADAPTER
from rl_launch.session.checkpoints.manifest import Manifest
from rl_launch.session.directory.checkpoint_name import CheckpointName
from rl_launch.session.directory.run_folder import RunFolder


def push(source: str, url: str, *, adapter: bool, private: bool) -> str:
    """Push a checkpoint with a model card, and return its address.

    Args:
        source: The checkpoint, as `CheckpointName` reads it.
        url: `hf://OWNER/NAME`, or a folder as `s3://bucket/folder` or `file:///folder`.
        adapter: Push the adapters by themselves.
        private: Whether a repository that is made on the hub is private.

    Raises:
        ConfigError: If the destination cannot be written to.
        RunDirectoryError: If there is no such checkpoint, or it is damaged.
    """
    try:
        destination = destination_of(url, private=private)
    except ValueError as error:
        raise ConfigError(f"URL: {error}") from None
    named = CheckpointName.parse(source) or CheckpointName(Path(source))
    run, checkpoint, adapter = RunFolder(named.run), named.checkpoint(), adapter or named.part == ADAPTER
    folder = checkpoint.with_name(f".{checkpoint.name}.push-{os.getpid()}")
    try:
        stage(run, checkpoint, folder, adapter=adapter, name=destination.loadable_name)
        destination.check()
        step = Manifest.read(checkpoint).step
        return destination.upload(folder, step=step, title=f"Step {step}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
