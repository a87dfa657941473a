"""`rl view`: serve a page over runs, or export it as static files."""

from __future__ import annotations

import signal
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rl_launch.session.directory.run_folder import RUNS
from rl_launch.view.catalog import Catalog
from rl_launch.view.export import Limits
from rl_launch.view.export import export as export_to
from rl_launch.view.index import cache_folder
from rl_launch.view.server import ViewServer


def catalog_of(paths: Sequence[Path]) -> Catalog:
    """Return the catalog of some paths; of the folder `runs` if there are none.

    Raises:
        RunDirectoryError: If a path does not exist.
    """
    return Catalog(list(paths) or [Path(RUNS)], cache_folder())


def serve(catalog: Catalog, port: int, say: Callable[[str], None], *, opens_browser: bool = False) -> None:
    """Serve a catalog until an interrupt or SIGTERM.

    Args:
        catalog: Catalog to serve.
        port: Port on the loopback interface; 0 for a free one.
        say: Is given the address.
        opens_browser: True to open the address in a browser.

    Raises:
        ConfigError: If the port is in use.
    """
    server = ViewServer(catalog, port)
    serving = threading.Thread(target=server.serve, name="rl-view", daemon=True)
    serving.start()
    ended = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        say(server.url)
        if opens_browser:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            while not ended.wait(1.0):
                pass
    finally:
        signal.signal(signal.SIGTERM, earlier)
        server.close()


def export(catalog: Catalog, folder: Path, limits: Limits) -> int:
    """Write the page as static files; returns the number of exported rollouts.

    Args:
        catalog: Catalog to export.
        folder: A new or empty folder, or an earlier export.
        limits: Limits of the rollouts.

    Raises:
        ConfigError: If the folder holds something else.
    """
    return export_to(catalog, folder, limits)
