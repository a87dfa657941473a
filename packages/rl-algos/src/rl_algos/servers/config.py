"""Settings of generation by servers, `policy.generation.server_cfg`, and the checks of a config with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from rl_algos.judges.config import GeneratorJudgeConfig
from rl_algos.judges.needs import engine_of, language_judges
from rl_core.config import Problem, ProblemError, WhenChanged
from rl_core.model_config import EngineConfig
from rl_core.run_config import RunConfig

KEY = "generation.server_cfg"

MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one without an error."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ServerConfig(EngineConfig):
    """Settings of generation by HTTP servers that somebody else runs."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """Program of the servers. `vllm`: 0.32 or newer, started with `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out` and
    `--logprobs-mode processed_logprobs`. `sglang`: 0.5.23 or newer. Both serve the policy's model in
    its precision."""
    urls: Annotated[list[str], WhenChanged.RESUME] = []
    """Addresses of the servers, such as `http://10.0.0.5:8000`. Each is a replica of the run: rollouts are distributed
    over them. All must read the folder `weights/` of the run directory under the same path. The run starts when all of
    them answer. A server that is lost later is left out while `policy.generation.min_replicas` (1 if unset) remain, and
    gets the current weights before it generates again."""
    api_key_env: Annotated[str | None, WhenChanged.RESUME] = None
    """Name of the environment variable with the key of the servers, which every node of the run has; none is sent if
    unset."""

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        problems = []
        for place, url in enumerate(self.urls):
            try:
                parts = urlsplit(url)
                is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                parts, is_url = urlsplit(""), False
            if parts.username or parts.password or parts.query:
                # The address would be shown with its key.
                reason, remedy = "must not contain a key", "Set the name of an environment variable in api_key_env"
                problems.append(Problem(f"urls.{place}", reason, remedy=remedy))
            elif not is_url:
                reason, remedy = "is not an address of a server", "Set one like http://10.0.0.5:8000"
                problems.append(Problem(f"urls.{place}", reason, got=url, remedy=remedy))
            elif url.rstrip("/") in {other.rstrip("/") for other in self.urls[:place]}:
                reason = "is there twice, but each server is one replica"
                problems.append(Problem(f"urls.{place}", reason, got=url, remedy="Remove it"))
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            # It may be the key itself, which is not repeated.
            reason, remedy = "is not the name of an environment variable", "Set a name such as SERVER_KEY, not the key"
            problems.append(Problem("api_key_env", reason, remedy=remedy))
        if problems:
            raise ProblemError(*problems)
        return self


def server_problems(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of a config whose policy is served by servers."""
    generation = section.generation
    settings: ServerConfig = generation.server_cfg
    if not settings.urls:
        yield Problem(f"{KEY}.urls", "is empty", remedy="List the addresses of your servers")
    if generation.colocated.enabled:
        reason = "must be false with generation.backend=server, whose servers have their own devices"
        yield Problem("generation.colocated.enabled", reason, got=True, remedy="Set it to false")
    for name in ("num_nodes", "gpus_per_node"):
        if (value := getattr(generation.colocated.resources, name)) is not None:
            because = "with generation.backend=server, whose servers have their own devices"
            yield Problem.unused(f"generation.colocated.resources.{name}", because)
    if generation.weight_sync not in ("auto", "disk"):
        reason = "does not reach servers, which read weights from files"
        yield Problem("generation.weight_sync", reason, got=generation.weight_sync, allowed="auto, disk")
    if generation.weight_sync_encoding != "full":
        reason = "is not a format that servers load"
        encoding = generation.weight_sync_encoding
        yield Problem("generation.weight_sync_encoding", reason, got=encoding, allowed="full")
    if generation.max_replicas is not None:
        because = f"with generation.backend=server: the number of replicas is the number of {KEY}.urls"
        yield Problem.unused("generation.max_replicas", because)
    elif (generation.min_replicas or 1) > max(1, len(settings.urls)):
        reason = f"exceeds the number of {KEY}.urls ({len(settings.urls)})"
        yield Problem("generation.min_replicas", reason, got=generation.min_replicas, remedy="Lower it, or add servers")
    if settings.engine == "vllm":
        for name in ("temperature", "val_temperature"):
            if 0 < (value := getattr(generation, name)) < MIN_TEMPERATURE:
                reason = "is below the temperatures at which vLLM samples"
                yield Problem(f"generation.{name}", reason, got=value, allowed=f"at least {MIN_TEMPERATURE}")
    else:
        for name, none in (("top_p", 1.0), ("top_k", None), ("min_p", 0.0)):
            if (value := getattr(generation, name)) != none:
                reason = (
                    "is not supported by the sglang server, whose logprobs are over all tokens and not over those that "
                    "the filter keeps"
                )
                yield Problem(f"generation.{name}", reason, got=value, remedy="Remove it, or use a vllm server")
    if further := _further_engines(config):
        reason = "needs an engine of the run, and servers serve the policy only"
        remedy = "Set policy.generation.backend=vllm or hf; a judge may also be an endpoint (kind: endpoint)"
        yield Problem("generation.backend", f"{reason} ({further})", got="server", remedy=remedy)


def _further_engines(config: Any) -> str:
    """Return the key of a setting that needs a further engine next to the policy's; empty if none does."""
    agents = vars(config.grpo.agents) if config.algorithm == "grpo" else {}
    for name, agent in agents.items():
        if agent.opponent is not None:
            return f"grpo.agents.{name}.opponent"
    for name, judge in language_judges(config).items():
        if isinstance(judge, GeneratorJudgeConfig) and engine_of(name, judge):
            return f"judges.{name}"
    return ""
