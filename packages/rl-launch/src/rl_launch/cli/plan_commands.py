"""`rl plan`: memory, time and cost of a run before it starts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

from rl_launch.cli.failure import reported
from rl_launch.cli.options import AsJson, Overrides, named, option, write_json


def plan(
    recipe: Annotated[
        str, named("RECIPE|FILE.yaml|RUN", "Name of a recipe, a YAML file, or a run directory. Optional with --from.")
    ] = "",
    overrides: Overrides = None,
    device: Annotated[
        str | None, option("--device", "Device to plan for, such as h100 (default: that of the config).", "NAME")
    ] = None,
    price: Annotated[float | None, option("--price", "Price of an hour of one device.", min=0)] = None,
    tokens: Annotated[
        float | None, option("--tokens", "Mean tokens of a completion, or of a row of data.", min=1)
    ] = None,
    prompt_tokens: Annotated[float | None, option("--prompt-tokens", "Mean tokens of a prompt.", min=1)] = None,
    run: Annotated[
        str, option("--from", "Take lengths from a run, and times too if its own config is planned.", "RUN")
    ] = "",
    learn: Annotated[bool, option("--learn", "Correct later plans on this device by the times of that run.")] = False,
    verify: Annotated[
        bool, option("--verify", "Count on the model's real layers too, in the worker's environment. Takes a minute.")
    ] = False,
    what_if: Annotated[
        bool, option("--what-if", "Simulate other replicas, staleness, lengths and devices. Comes with --from.")
    ] = False,
    search: Annotated[bool, option("--search", "List the fastest layouts on the same devices.")] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory, time and cost of a run from its config, without a GPU: what each phase takes of a device,
    and the smallest change that fits.

    With --json: {"schema": 1, "recipe", "device", "num_devices", "device_bytes": NUMBER|null, "fits": bool|null,
    "fullest", "memory": [{"role", "phase", "device": {NAME: BYTES}, "host": {NAME: BYTES}}, ...], "host_bytes",
    "checkpoint_bytes", "num_checkpoints": NUMBER|null, "seconds": {PHASE: NUMBER}, "step_seconds": NUMBER|null,
    "tokens", "tokens_per_second", "cost": NUMBER|null, "factors": {PHASE: NUMBER}, "memory_factors": {PHASE: NUMBER},
    "learned_from": [RUN, ...], "assumptions": [SENTENCE, ...], "problems": [SENTENCE, ...], "change": {"overrides",
    "step_seconds", "remark"}|null, "search": [...], "measured": {"seconds": {PHASE: NUMBER}, "memory": [{"role",
    "phase", "bytes"}, ...]}|null of a run, "verified": [{"role", "part", "planned", "counted": NUMBER|null}, ...],
    "simulation": {"source", "problem", "cases": [{"name", "step_seconds", "idle"}, ...]}|null}.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.commands.planning import plan_recipe
        from rl_launch.planning.text import as_json as plain
        from rl_launch.planning.text import lines, search_lines
        from rl_launch.planning.workload import Lengths

        if learn and not run:
            raise ConfigError("--learn needs the run to learn from. Add --from RUN, or remove it.")
        answer = plan_recipe(
            recipe,
            overrides or (),
            device=device,
            lengths=Lengths(prompt_tokens, tokens),
            searches=search,
            run=run,
            learns=learn,
            verifies=verify,
            simulates=what_if,
        )
        if as_json:
            found = plain(answer.plan, price=price, change=answer.change, found=answer.found, took=answer.took)
            verified = [asdict(each) for each in answer.verified]
            simulation = None if answer.simulation is None else answer.simulation.as_json()
            write_json({**found, "verified": verified, "simulation": simulation})
            return
        shown = [*lines(answer.plan, price=price, change=answer.change, took=answer.took)]
        if search:
            shown += search_lines(answer.found, answer.plan)
        if answer.verified:
            from rl_launch.commands.verified_plan import lines as verified_lines

            shown += verified_lines(answer.verified)
        if answer.simulation is not None:
            shown += answer.simulation.lines()
        sys.stdout.write("\n".join(shown) + "\n")
