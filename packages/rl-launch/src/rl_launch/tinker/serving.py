"""`rl serve tinker`: the server of a recipe, from its config to its end."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError, RLError
from rl_launch.root_config import TinkerConfig
from rl_launch.run_config.served import served_folder, served_plan
from rl_launch.run_session.directory.lock import DirectoryLock
from rl_launch.tinker.records import TenantRecords

if TYPE_CHECKING:
    from rl_launch.run_config.plan import RunPlan
    from rl_launch.tinker.host import AdapterHost

_NEEDED = ("tinker", "google.protobuf", "zstandard")


def serve_tinker(
    recipe: str, overrides: Sequence[str], say: Callable[[str], None], failed_in: Callable[[Path], None]
) -> None:
    """Serve a recipe until an interrupt or SIGTERM.

    Args:
        recipe: Name of a recipe, or a YAML file.
        overrides: Config keys to set.
        say: Called with lines about the progress.
        failed_in: Called with the folder of the server, for the traceback of a failure.

    Raises:
        ConfigError: If the config has problems, or the packages of the server are not installed.
        RLError: If the models do not start, or cannot be started again after a failure.
    """
    check_installed()
    from rl_launch.tinker.run_host import run_host
    from rl_launch.tinker.server import check_exposure

    plan = served_plan(recipe, overrides)
    config: TinkerConfig = vars(plan.config).get("tinker") or TinkerConfig()
    check_exposure(config)
    folder = served_folder(plan, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    failed_in(folder)
    lock = DirectoryLock(folder)
    lock.acquire()
    try:
        say(f"starting {plan.config.policy.model_name} in {folder}")
        queue = Path(config.queue_dir).expanduser() if config.queue_dir else folder / "tinker"
        records = TenantRecords(folder, plan.config.logger, plan.root)
        asyncio.run(_serve(lambda: run_host(plan, folder), config, queue, ends_of(plan), records, say))
    finally:
        lock.release()


async def _serve(
    enter_host: Callable[[], AbstractContextManager[AdapterHost]],
    config: TinkerConfig,
    queue: Path,
    ends: Sequence[int],
    records: TenantRecords,
    say: Callable[[str], None],
) -> None:
    from rl_launch.tinker.server import TinkerServer

    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)

    @contextmanager
    def hosting() -> Iterator[AdapterHost]:
        with enter_host() as host:
            # Ray replaces the handlers of signals when it starts.
            loop.call_soon_threadsafe(listen)
            yield host

    listen()
    server = TinkerServer(hosting, config, queue, ends)
    try:
        await server.start()
        keys = f"keys of {', '.join(server.tenants)}" if config.keys_file else "any key that begins with tml-"
        say(f"serving {server.api.base_model} at {server.url} to {keys}")
        say(f"export TINKER_BASE_URL={server.url}")
        recording = asyncio.ensure_future(records.keep(server.api.status))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stopped.wait())
        await asyncio.wait([stopping, server.ended], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        recording.cancel()
        await asyncio.wait([recording])
        if server.ended.done() and (error := server.ended.exception()) is not None:
            raise error if isinstance(error, RLError) else RLError(f"the models could not be started again: {error}")
        say("stopping; the same command continues")
    finally:
        await server.close()


def check_installed() -> None:
    """Check that the packages of the server are installed.

    Raises:
        ConfigError: If one is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        raise ConfigError(
            f"rl serve tinker needs {', '.join(missing)}, which is not installed: uv pip install 'rl-launch[tinker]'"
        )


def ends_of(plan: RunPlan) -> tuple[int, ...]:
    """Return the ids that end a completion of the policy of a plan."""
    from rl_algos.tokenizer import load_tokenizer
    from rl_algos.turn_ends import find_turn_ends
    from rl_launch.commands.train import with_local_models

    policy = with_local_models(plan).config.policy
    return find_turn_ends(load_tokenizer(policy.tokenizer, policy.model_name)).sampled
