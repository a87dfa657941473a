"""Settings of a run's checkpoints, records and metric writers."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from rl_core.config import Config, WhenChanged

_DESTINATION = re.compile(r"hf://[\w.-]+/[\w.-]+|(?!hf:)[a-z][a-z0-9+.-]*://\S+")
_DURATION = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")

Access = Literal["owner", "group", "all"]
"""Readers of a run directory."""


class CheckpointingConfig(Config):
    """When to save, and which checkpoints to keep."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    enabled: bool = True
    """Save checkpoints; without them a run cannot be resumed."""
    save_period: int = Field(default=10, ge=0)
    """Save after every this many steps; 0 saves at the end only."""
    async_save: bool = False
    """Write checkpoints while training goes on: a step waits only until the Hugging Face files are written and the
    state has been copied to host memory, which must have room for it. A checkpoint counts once it is whole, at the end
    of a later step."""
    keep_top_k: int | None = Field(default=3, gt=0)
    """Number of checkpoints to keep: the newest and the best by `metric_name`, or the newest ones; null keeps all."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, such as `val:accuracy`; one without a value at its step ranks last."""
    higher_is_better: bool = True
    """Whether a higher value of the metric is better."""
    checkpoint_must_save_by: str | None = None
    """Save and end in time before this much has passed since the start, as DD:HH:MM:SS: the limit of a batch queue."""
    push_to: str | None = None
    """Push Hugging Face files of checkpoints, with a model card: to `hf://OWNER/NAME` on the Hugging Face hub (with the
    token of HF_TOKEN or `hf auth login`), or to a folder of a store (`s3://BUCKET/FOLDER`, `gs://...`,
    `file:///FOLDER`). Training does not wait for it, and a failure never ends the run."""
    push_checkpoints: Literal["last", "best", "every"] = "last"
    """Checkpoints to push: the `last` one when the run has finished, the `best` one by `metric_name` whenever there is
    another, or `every` one. On the hub each is a commit; a store has the folder `step_<n>` for each with `every`."""
    push_adapter: bool = False
    """Push adapters by themselves, in the format of `peft`; otherwise the whole model, with adapters merged."""
    push_private: bool = True
    """Visibility of a repository that is made on the hub; one that exists keeps its own."""

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _is_duration(cls, value: str | None) -> str | None:
        if value is not None and not _DURATION.fullmatch(value):
            raise ValueError(f"got {value!r}; allowed: DD:HH:MM:SS, such as 00:03:45:00")
        return value

    @field_validator("push_to")
    @classmethod
    def _is_destination(cls, value: str | None) -> str | None:
        if value is not None and not _DESTINATION.fullmatch(value):
            raise ValueError(
                f"got {value!r}; allowed: hf://OWNER/NAME for the Hugging Face hub, s3://BUCKET/FOLDER, gs://... or "
                "abfs://..., or file:///FOLDER"
            )
        return value

    @property
    def must_save_by_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds."""
        found = _DURATION.fullmatch(self.checkpoint_must_save_by or "")
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    @property
    def metric_key(self) -> str | None:
        """`metric_name` as `metrics.jsonl` spells it: `val/accuracy`."""
        return self.metric_name.replace(":", "/", 1) if self.metric_name else None


class CallbackConfig(Config):
    """A class whose hooks the run calls during training."""

    type: str
    """`file.py:Class` or `package.module:Class`, a class that extends `rl_core.Callback`."""
    on_error: Literal["warn", "stop"] = "warn"
    """If a hook raises: `warn` reports it with file and line and turns the callback off; `stop` ends the run after the
    step, with a checkpoint and exit code 1."""
    settings: dict[str, Any] = {}
    """Settings: fields of the class if it is a dataclass, otherwise keyword-only parameters of its constructor."""

    @classmethod
    def of(cls, written: str | CallbackConfig) -> CallbackConfig:
        """Return the section for an entry of `callbacks`, which may be the `type` only."""
        return cls(type=written) if isinstance(written, str) else written


class WandbConfig(Config):
    project: str = "rl"
    """Project of the run."""
    entity: str | None = None
    """User or team that the project belongs to; the default entity of the account if unset."""
    name: str | None = None
    """Name of the run; `logger.name` if unset. Its group, tags and notes are those of `logger`."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes into the run's `logs/wandb` for `wandb sync` to upload later; `WANDB_MODE` or `online` if
    unset."""


class MLflowConfig(Config):
    experiment_name: str = "rl"
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run; `logger.name` if unset."""
    tracking_uri: str | None = None
    """Server (`http://...`) or database (`sqlite:////FOLDER/mlflow.db`); `MLFLOW_TRACKING_URI` if unset, or else a file
    `mlflow.db` in the current folder."""


class TrackioConfig(Config):
    project: str = "rl"
    """Project of the run."""
    name: str | None = None
    """Name of the run, to which a suffix is added that makes it unique; `logger.name` if unset."""
    space_id: str | None = None
    """Space on the Hugging Face hub to log to, such as `me/runs`; on this machine if unset."""


class LoggerConfig(Config):
    """Records of a run: TensorBoard, Weights & Biases, MLflow, rollouts, and who may read them."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    name: str | None = None
    """Name of the run in trackers; the name of its folder if unset. `rl label` changes name, group, tags and notes
    later."""
    group: str | None = None
    """Group of the run: runs that belong together, such as those of an ablation. `rl runs --filter group=NAME` lists
    them."""
    tags: list[Annotated[str, Field(min_length=1)]] = []
    """Tags of the run; `rl runs --filter tag=NAME` lists the runs that have one."""
    notes: str | None = None
    """Notes on the run, for people."""
    rollout_period: int = Field(default=1, ge=0)
    """Write the rollouts of every this many steps into the run directory; 0 writes none."""
    run_dir_access: Access = "owner"
    """Access to a run directory that the run makes: `owner` lets nobody else in (mode 0700), `group` also lets the
    group of the folder read it (0750), `all` everybody on the machine (0755). An existing folder keeps its mode."""
    tensorboard_enabled: bool = True
    """Write TensorBoard events into `logs/tensorboard`."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases; needs rl-launch[wandb]."""
    mlflow_enabled: bool = False
    """Send metrics to MLflow; needs rl-launch[mlflow]."""
    trackio_enabled: bool = False
    """Send metrics to trackio; needs rl-launch[trackio]."""
    wandb: WandbConfig = WandbConfig()
    mlflow: MLflowConfig = MLflowConfig()
    trackio: TrackioConfig = TrackioConfig()
