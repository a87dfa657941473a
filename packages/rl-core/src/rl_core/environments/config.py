"""Settings that every environment has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_core.config import Config, EnvVars, WhenChanged


class EnvironmentConfig(Config):
    """Base of an environment's settings, `env.<name>`."""

    type: str | None = None
    """Environment to run: an installed environment, or your own as `file.py:function`, `package.module:function`, or a
    class instead of the function. If unset, the installed environment with the name of the section."""
    rewards: dict[str, str] | list[str] = {}
    """Functions whose rewards are added up, by reported name (`reward/<name>`): each as `file.py:function` or
    `package.module:function`, such as `rl_core:thinking_format`. In a list, the function's name is the name. They score
    the newest turn of a rollout that ends. With `type` they are added to the reward of that environment."""
    reward_weights: dict[str, float] | list[float] = {}
    """Weights of `rewards` by name, 1 if unset; for a list of rewards, a list of all weights. Reported values are not
    weighted."""
    num_workers: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, ge=1)
    """Number of processes that run the environment; by default one per CPU of their node, up to 8. Answers that take up
    to the deadline are checked that many at a time."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=30.0, gt=0)
    """Timeout of a call in seconds. A rollout whose call takes longer fails, and the process that hangs is replaced. If
    the process that hosts the environment does not answer for 30 s more than this, it is restarted."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=1, ge=1)
    """Maximum number of conversations in one call of the environment's `step`, which share its deadline. Increase it
    for an environment that answers many at once faster than one after the other, such as one that calls a server."""
    max_concurrent: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, ge=1)
    """Maximum number of conversations in progress at a time on each node: those in a call, and those with several turns
    from their first turn to their end. Others wait before their first turn. Set it for an environment whose
    conversations each hold a scarce resource, such as a browser, or that calls a server with little capacity. If unset,
    only `num_workers` and `max_batch` limit the calls."""
    retries: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Number of times that a turn is retried after its call raised, passed the deadline or ended its process, for an
    environment whose calls can safely be repeated, such as one that calls a server. A conversation with state is
    retried only if the environment saves its states (`save` and `restore`), because its state may be only partly
    updated."""
    memory_limit_gib: Annotated[float | None, WhenChanged.RESUME] = Field(default=4.0, gt=0)
    """Maximum memory in GiB that a process may allocate (RLIMIT_DATA). A rollout whose call needs more fails. null sets
    no limit."""
    env_vars: Annotated[EnvVars, WhenChanged.RESUME] = {}
    """Environment variables of the processes. Of the driver's variables they see only paths, locale and caches, so pass
    the keys that an environment needs here: `{OPENAI_API_KEY: "${oc.env:OPENAI_API_KEY}"}`."""
