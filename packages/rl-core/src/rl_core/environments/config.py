"""Settings that every environment has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_core.config import Config, EnvVars, WhenChanged


class EnvironmentConfig(Config):
    """Base of an environment's settings, `env.<name>`."""

    type: str | None = None
    """An installed environment, or one of your own: `file.py:function`, `package.module:function`, or a class instead
    of the function; the installed environment of the section's name if unset."""
    rewards: dict[str, str] | list[str] = {}
    """Functions that are rewards together, by the names that they are reported under (`reward/<name>`): each as
    `file.py:function` or `package.module:function`, such as `rl_core:thinking_format`. In a
    list, the function's name is the name. They score the newest turn of a rollout that ends. With `type`
    they are added to the reward of that environment."""
    reward_weights: dict[str, float] | list[float] = {}
    """Weights of `rewards` by their names, 1 if unset; or, of a list of rewards, a list of all of them. What is
    reported has no weight."""
    num_workers: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, ge=1)
    """Processes that run the environment; by default one per CPU of their node, 8 at most. Answers that take up to the
    deadline are checked that many at a time."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=30.0, gt=0)
    """Most seconds of a call; a rollout whose call takes longer fails, and the process that hangs is replaced."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=1, ge=1)
    """Most conversations of one call of the environment's `step`, which share its deadline. Raise it for an
    environment that answers many at once faster than one after the other, such as one that calls a server."""
    max_concurrent: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, ge=1)
    """Most conversations that it has under way at a time on each node: those in a call, and those of several turns from
    their first turn to their end. Others wait before their first turn. Set it for an environment whose conversations
    each hold something scarce, such as a browser, or that calls a server which serves a few at a time; unset,
    `num_workers` and `max_batch` alone limit the calls."""
    retries: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Times that a turn is tried again after its call raised, passed the deadline or ended its process, for an
    environment whose calls may safely be made twice, such as one that calls a server. A conversation that has a state
    is not tried again, as its state may be half stepped."""
    memory_limit_gib: Annotated[float | None, WhenChanged.RESUME] = Field(default=4.0, gt=0)
    """Most memory that a process may allocate (RLIMIT_DATA); a rollout whose call needs more fails. None for no
    limit."""
    env_vars: Annotated[EnvVars, WhenChanged.RESUME] = {}
    """Environment variables of the processes. Of the driver's variables they see only paths, locale and caches, so an
    environment that needs a key gets it here: `{OPENAI_API_KEY: "${oc.env:OPENAI_API_KEY}"}`."""
