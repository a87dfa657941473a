"""Settings of a run's checkpoints, records, metric writers, monitoring and notifications."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rl_core.config import Config, Problem, ProblemError, WhenChanged
from rl_core.tracing.profiling import Tool

Event = Literal["finished", "failed", "interrupted", "resumed", "stalled", "alarm"]
"""Changes of a run's state that somebody may want to know."""


_DESTINATION = re.compile(r"hf://[\w.-]+/[\w.-]+|(?!hf:)[a-z][a-z0-9+.-]{0,30}://\S+")

_DURATION = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")

_FORMS = {
    "checkpoint_must_save_by": (_DURATION, "DD:HH:MM:SS, such as 00:03:45:00"),
    "push_to": (
        _DESTINATION,
        "hf://OWNER/NAME for the Hugging Face hub, s3://BUCKET/FOLDER, gs://..., abfs://..., file:///FOLDER",
    ),
}

Access = Literal["owner", "group", "all"]
"""Users who can read a run directory."""

TokenLevel = Literal["none", "sampled", "all"]
"""Rollouts of a step whose tokens are recorded."""


class MonitoringConfig(Config):
    """How often machines and workers are read."""

    period_s: float = Field(default=10.0, ge=1.0)
    """Seconds between two readings. Each reading is one call of every worker, answered next to its work within
    milliseconds; a step shorter than this has one reading."""


class NotifyConfig(Config):
    """Notifications of changes of a run's state. Nothing is sent without `url` or `command`."""

    url: str | None = None
    """Webhook that gets a POST of JSON with `event`, `text`, `run`, `run_dir`, `step`, `max_steps`, `reason`, `host`
    and `at`. Webhooks of Slack and Mattermost show `text`. If the URL contains a secret, write `${oc.env:NAME}`,
    because the config is stored with the run; logs show the host only."""
    command: list[Annotated[str, Field(min_length=1)]] = []
    """Program with its arguments that is run on the driver's machine, without a shell. It gets the same JSON on
    standard input, and its values as `RL_EVENT`, `RL_TEXT`, `RL_RUN` and so on in the environment."""
    events: list[Event] = ["finished", "failed", "interrupted", "resumed", "stalled", "alarm"]
    """Events to notify of. `interrupted` is a signal or a time limit, `resumed` a run that continues from a checkpoint.
    `stalled` is no step for `stalled_after` times the usual time. `alarm` is a metric that is not a finite number, or a
    finding of the advice that `rl show` prints; each is sent once."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout in seconds of an attempt. Failed attempts are repeated after 2, 10 and 30 seconds, in the background."""
    stalled_after: float = Field(default=5.0, gt=1)
    """Multiple of the usual time between two steps after which a run is stalled, but at least one minute. The usual
    time is the median of the last 16."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        # the value may be a secret, so the message does not repeat it
        if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            raise ProblemError(Problem("", "is not a URL", allowed="http://HOST/... or https://HOST/..."))
        return value

    @property
    def is_enabled(self) -> bool:
        """True if notifications are sent."""
        return bool(self.url or self.command)


class CheckpointingConfig(Config):
    """When to save checkpoints, and which ones to keep."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    enabled: bool = True
    """Save checkpoints. Without checkpoints a run cannot be resumed."""
    save_period: int = Field(default=10, ge=0)
    """Number of steps between checkpoints. With 0 a checkpoint is saved at the end only."""
    export_period: int | None = Field(default=None, ge=0)
    """Number of steps between checkpoints that also hold the policy as Hugging Face files, a multiple of `save_period`.
    The last checkpoint of a finished run always holds them; with 0 only that one. If unset, every checkpoint. Large
    models take minutes to write; `rl convert` makes the files of a checkpoint without them."""
    async_save: bool = False
    """Write checkpoints while training continues. A step waits only until the Hugging Face files are written and the
    state is copied to host memory, which must have room for it. A checkpoint becomes valid when it is complete, at the
    end of a later step."""
    keep_top_k: int | None = Field(default=3, gt=0)
    """Number of checkpoints to keep: the best N by `metric_name`, and always the newest; without a metric the newest N.
    Null keeps all checkpoints. Plan disk for N + 2, because another one is being written."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, such as `val:accuracy`. A checkpoint of a step without a value ranks last."""
    higher_is_better: bool = True
    """True if a higher value of the metric is better."""
    checkpoint_must_save_by: str | None = None
    """Time limit since the start as DD:HH:MM:SS, for example the limit of a batch queue. The run saves a checkpoint and
    ends before the limit."""
    push_to: str | None = None
    """Destination to which Hugging Face files of checkpoints are pushed, with a model card: `hf://OWNER/NAME` on the
    Hugging Face hub (with the token of HF_TOKEN or `hf auth login`), or a folder in a store (`s3://BUCKET/FOLDER`,
    `gs://...`, `file:///FOLDER`). Training does not wait for the push, and a failed push never ends the run."""
    push_checkpoints: Literal["last", "best", "every"] = "last"
    """Checkpoints to push: the `last` one when the run has finished, the `best` one by `metric_name` whenever it
    changes, or `every` one. On the hub each push is a commit. In a store, `every` creates a folder `step_<n>` for each.
    """
    push_adapter: bool = False
    """Push only the adapters, in the format of `peft`. Otherwise the whole model is pushed, with adapters merged."""
    push_private: bool = True
    """True if a new repository on the hub is private. An existing repository keeps its visibility."""

    @field_validator("checkpoint_must_save_by", "push_to")
    @classmethod
    def _is_well_formed(cls, value: str | None, info: ValidationInfo) -> str | None:
        pattern, allowed = _FORMS[str(info.field_name)]
        if value is not None and not pattern.fullmatch(value):
            raise ProblemError(Problem("", got=value, allowed=allowed))
        return value

    @model_validator(mode="after")
    def _check_exports(self) -> CheckpointingConfig:
        period, saves = self.export_period, self.save_period
        if period and (not saves or period % saves):
            wanted = (
                f"a multiple of checkpointing.save_period ({saves})" if saves else "0, as checkpointing.save_period is"
            )
            remedy = "Hugging Face files are written along with a checkpoint"
            raise ProblemError(Problem("export_period", f"must be {wanted}", got=period, remedy=remedy))
        if period is not None and self.push_to is not None and self.push_checkpoints != "last":
            raise ProblemError(
                Problem(
                    "export_period",
                    f"cannot be combined with checkpointing.push_checkpoints={self.push_checkpoints}, because "
                    "checkpoints without Hugging Face files cannot be pushed",
                    got=period,
                    remedy="Remove this key, or set checkpointing.push_checkpoints=last",
                )
            )
        return self

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
        """`metric_name` as it is spelled in `metrics.jsonl`: `val/accuracy`."""
        return self.metric_name.replace(":", "/", 1) if self.metric_name else None


class ProfilingConfig(Config):
    """Profiles of workers over some steps, and traces of all processes. See docs/profiling.md."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    steps: list[Annotated[int, Field(ge=1)]] | None = None
    """First and last step to profile, both included: `[5, 7]` profiles three steps. The files are in
    `profiles/step_5-7` of the run directory. Null profiles nothing. Choose few steps, after the first two: a trace of
    a long step has gigabytes."""
    ranks: list[Annotated[int, Field(ge=0)]] = [0]
    """Workers to profile: ranks of every model, and numbers of the generators."""
    tools: list[Tool] = ["torch"]
    """Tools: `torch` (operators and kernels, a Chrome trace), `memory` (history of the CUDA allocator), `py-spy`
    (samples of the Python stacks of all threads, for speedscope; requires rl-launch[profiling]) and `nsys` (Nsight
    Systems, which must be installed on every node). `memory` and `nsys` need GPUs."""
    traces: bool = True
    """Write the phases of the driver, the calls of workers, generation, environments, weight syncs and restarts to
    `traces` of the run directory, as Chrome traces of 20 steps each. `rl view` shows them."""

    @field_validator("steps")
    @classmethod
    def _is_range(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (len(value) != 2 or value[0] > value[1]):
            raise ProblemError(Problem("", got=value, allowed="[FIRST, LAST], such as [5, 7]"))
        return value

    @field_validator("ranks", "tools")
    @classmethod
    def _is_not_empty(cls, value: list[Any]) -> list[Any]:
        if not value:
            raise ProblemError(Problem("", got=value, allowed="at least one entry", remedy="Set steps to null"))
        return value


class CallbackConfig(Config):
    """A class with hooks that the run calls during training."""

    type: str
    """Subclass of `rl_core.Callback`, as `file.py:Class` or `package.module:Class`."""
    on_error: Literal["warn", "stop"] = "warn"
    """Action if a hook raises an exception. `warn` reports it with file and line and turns the callback off. `stop`
    ends the run after the step, with a checkpoint and exit code 1."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Time limit in seconds of one call of a hook. A hook that takes longer is interrupted, like one that raises.
    There is no limit if `rl_launch.train` is called outside of the main thread, where nothing can be interrupted."""
    settings: dict[str, Any] = {}
    """Settings of the class: its fields if it is a dataclass, otherwise keyword-only parameters of its constructor."""

    @classmethod
    def of(cls, written: str | CallbackConfig) -> CallbackConfig:
        """Return the section for an entry of `callbacks`, which can be only the `type`."""
        return cls(type=written) if isinstance(written, str) else written


GuardrailAction = Literal["warn", "skip_step", "lower_staleness", "rollback", "stop"]
"""What a run does if a guardrail is broken."""


class GuardrailConfig(Config):
    """A rule over a metric of the steps, and the action of the run if it is broken."""

    metric: str
    """Metric, as `metrics.jsonl` spells it, such as `policy/kl`. Without a bound, the rule is broken if `rl show`
    advises on this metric first: `reward/mean` for a collapse, `mismatch/kl`, `policy/nll` for a lost entropy."""
    above: float | None = None
    """The rule is broken above this value."""
    below: float | None = None
    """The rule is broken below this value."""
    falls_by: float | None = Field(default=None, gt=0)
    """The rule is broken if the metric is this much below the highest mean that it has had over `patience` steps."""
    rises_by: float | None = Field(default=None, gt=0)
    """The rule is broken if the metric is this much above the lowest mean that it has had over `patience` steps."""
    patience: int = Field(default=3, ge=1)
    """Number of steps in a row that break the rule before the run acts. Steps without the metric do not count."""
    action: GuardrailAction = "warn"
    """`warn`: a warning in the log, once until the metric recovers. `stop`: the run ends with an error, saved; the same
    command resumes it. `rollback`: the run goes back to the newest checkpoint from before these steps, with
    `change`. `lower_staleness`: the run is saved and goes on with `async_grpo.max_trajectory_age_steps` lower by 1.
    `skip_step`: an optimizer step whose gradient norm (`metric: train/grad_norm`, `above`) is larger is skipped."""
    change: dict[str, Any] = {}
    """Keys of the config with the values that they have after a rollback; `x0.5` multiplies the present value:
    `{policy.optimizer.kwargs.lr: x0.5}`. Each rollback changes them again."""
    max_actions: int = Field(default=3, ge=1)
    """Maximum number of actions of this rule in a run. After that it only warns."""

    @property
    def has_bound(self) -> bool:
        """True if the rule has a bound of its own."""
        return any(bound is not None for bound in (self.above, self.below, self.falls_by, self.rises_by))


class WandbConfig(Config):
    """Run in Weights & Biases."""

    project: str = "rl"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project. The default is the default entity of your account."""
    name: str | None = None
    """Name of the run. The default is `logger.name`. Group, tags and notes are taken from `logger`."""
    mode: Literal["online", "offline"] | None = None
    """Mode of the client. `offline` writes to `logs/wandb` of the run, for a later upload by `wandb sync`. The default
    is `WANDB_MODE`, or else `online`."""


class MLflowConfig(Config):
    """Run in MLflow."""

    experiment_name: str = "rl"
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run. The default is `logger.name`."""
    tracking_uri: str | None = None
    """Server (`http://...`) or database (`sqlite:////FOLDER/mlflow.db`). The default is `MLFLOW_TRACKING_URI`, or else
    the file `mlflow.db` in the current folder."""


class TrackioConfig(Config):
    """Run in trackio."""

    project: str = "rl"
    """Project of the run."""
    name: str | None = None
    """Name of the run. A suffix is added to make it unique. The default is `logger.name`."""
    space_id: str | None = None
    """Space on the Hugging Face hub to log to, such as `me/runs`. By default metrics stay on this machine."""


class SwanLabConfig(Config):
    """Run in SwanLab."""

    project: str = "rl"
    """Project of the run."""
    workspace: str | None = None
    """User or organization that owns the project. The default is your own workspace."""
    name: str | None = None
    """Name of the run. The default is `logger.name`. Group, tags and notes are taken from `logger`."""
    mode: Literal["online", "offline", "local"] | None = None
    """Mode of the client. `offline` writes to `logs/swanlab` of the run, for a later upload by `swanlab sync`; `local`
    is for SwanLab's own board. The default is `SWANLAB_MODE`, or else `online`."""


class ClearMLConfig(Config):
    """Task in ClearML. Its server and credentials come from ClearML's own file or `CLEARML_*` variables."""

    project: str = "rl"
    """Project of the task."""
    name: str | None = None
    """Name of the task. The default is `logger.name`. Tags and notes are taken from `logger`, its group is a tag."""
    offline: bool = False
    """Write a session to ClearML's cache instead of a server, for a later upload by
    `clearml-task --import-offline-session`."""


class LoggerConfig(Config):
    """Records of a run: trackers, TensorBoard and rollouts, and the access to them."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    name: str | None = None
    """Name of the run in trackers. The default is the name of its folder. Use `rl label` to change the name, group,
    tags and notes later."""
    group: str | None = None
    """Group of the run, for runs that belong together, such as the runs of an ablation. `rl runs --filter group=NAME`
    lists them."""
    tags: list[Annotated[str, Field(min_length=1)]] = []
    """Tags of the run. `rl runs --filter tag=NAME` lists the runs with a tag."""
    notes: str | None = None
    """Notes on the run, as free text."""
    rollout_period: int = Field(default=1, ge=0)
    """Write the rollouts of every N-th step to the run directory. With 0 no rollouts are written."""
    token_level: TokenLevel = "sampled"
    """Rollouts whose values per token (text, logprobs, advantage, loss mask, weight version) are written to
    `rollouts/tokens_<n>.parquet`, about 14 bytes per token, in the steps whose rollouts are written: rollouts of
    `sampled` groups, `all`, or `none`. `rl view` shows them. Only values that the algorithm computes anyway are
    written."""
    token_level_groups: int = Field(default=1, gt=0)
    """Number of groups of each step to write with `token_level: sampled`, drawn at random from the groups that were
    trained on. At most 65,536 tokens per group are written in a step."""
    replay_enabled: bool = False
    """Record the completions of all rollouts in `turns` of the run directory, about 8 bytes per token, so that `rl
    replay RUN:STEP` can make any step again, bit for bit, from the checkpoint before it."""
    run_dir_access: Access = "owner"
    """Read access to a new run directory: `owner` for you only (mode 0700), `group` also for the group of the folder
    (0750), `all` for everybody on the machine (0755). An existing folder keeps its mode."""
    tensorboard_enabled: bool = True
    """Write TensorBoard events to `logs/tensorboard`."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases. Requires rl-launch[wandb]."""
    mlflow_enabled: bool = False
    """Send metrics to MLflow. Requires rl-launch[mlflow]."""
    trackio_enabled: bool = False
    """Send metrics to trackio. Requires rl-launch[trackio]."""
    swanlab_enabled: bool = False
    """Send metrics to SwanLab. Requires rl-launch[swanlab]."""
    clearml_enabled: bool = False
    """Send metrics to ClearML. Requires rl-launch[clearml]."""
    monitoring_enabled: bool = False
    """Record the use of cores, memory and GPUs by every machine and worker, and the load of every replica, as
    `system/*` metrics of each step (mean and maximum)."""
    prometheus_port: int | None = Field(default=None, ge=1, le=65535)
    """Port at which the driver serves the metrics of the last step, and readings of machines, workers and replicas, in
    the OpenMetrics format for Prometheus. Requires rl-launch[prometheus]."""
    prometheus_host: str = "127.0.0.1"
    """Address that `prometheus_port` is opened on. The endpoint has no password: with `0.0.0.0` everybody who reaches
    the machine can read the metrics."""
    otel_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, such as `http://127.0.0.1:4318`. It gets the spans
    of steps, phases, weight syncs and rollouts. The variables `OTEL_*` set headers, resource attributes and batches.
    Requires rl-launch[otel]."""
    monitoring: MonitoringConfig = MonitoringConfig()
    notify: NotifyConfig = NotifyConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MLflowConfig = MLflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    swanlab: SwanLabConfig = SwanLabConfig()
    clearml: ClearMLConfig = ClearMLConfig()

    @model_validator(mode="after")
    def _has_rollouts_of_tokens(self) -> LoggerConfig:
        if self.token_level == "all" and not self.rollout_period:
            reason = "needs the rollouts, and logger.rollout_period=0 writes none"
            remedy = "Set logger.rollout_period=1, or logger.token_level=none"
            raise ProblemError(Problem("token_level", reason, got="all", remedy=remedy))
        return self

    @field_validator("otel_endpoint")
    @classmethod
    def _is_collector(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/\s]+", value):
            raise ProblemError(Problem("", got=value, allowed="http://HOST:4318 or https://HOST:4318"))
        return value

    @property
    def reads_workers(self) -> bool:
        """True if machines, workers and replicas are read while the run proceeds."""
        return self.monitoring_enabled or self.prometheus_port is not None
