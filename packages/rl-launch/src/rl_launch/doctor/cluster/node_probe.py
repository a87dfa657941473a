"""The part of `rl doctor --cluster` that runs on each node, as a Ray actor.

It needs only the standard library, ray and modules that are sent along: a node that has ray and nothing of this project
runs it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rl_launch.cluster.node_task import Sight, meet
from rl_launch.doctor.cluster.node_readings import Readings, readings_of_this_node

CONNECT_TIMEOUT_S = 5.0
_CHUNK_BYTES = 2**20


class Received(NamedTuple):
    """Data that a node has received from another.

    Attributes:
        num_bytes: Number of bytes.
        seconds: Time from the first byte to the last.
        problem: Why nothing was received; empty if something was.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


class RankEnd(NamedTuple):
    """The end of a rank's process.

    Attributes:
        code: Its exit code; None if it was ended after the time limit.
        output: Its standard output.
        error: Last line of its standard error.
    """

    code: int | None
    output: str
    error: str


class NodeProbe:
    """Reads the facts of its node and measures connections to other nodes.

    Args:
        address: Address of the node, as others reach it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._server: socket.socket | None = None

    def clock(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def readings(self, runs: str) -> Readings:
        """Return the facts of the node.

        Args:
            runs: Folder of runs.
        """
        return readings_of_this_node(self._address, runs)

    def meet(self, folder: str, token: str, name: str, folders: Sequence[str], patience_s: float) -> Sight:
        """See `rl_launch.cluster.node_task.meet`."""
        return meet(folder, token, name, folders, patience_s)

    def hub_problem(self, url: str, timeout_s: float) -> str:
        """Return why a URL of the model hub cannot be reached; empty if the hub answers."""
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
                return ""
        except urllib.error.HTTPError as error:
            return f"the answer is {error.code}" if error.code >= 500 or error.code == 407 else ""
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))

    def absent_in_cache(self, names: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """Return the models that are not in this node's cache of the hub.

        Args:
            names: Hub names.
            variables: Environment variables of workers that this process does not have.
        """
        chosen = {**os.environ, **variables}
        home = chosen.get("HF_HOME") or str(Path(chosen.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
        cache = Path(chosen.get("HF_HUB_CACHE") or str(Path(home) / "hub")).expanduser()
        return [name for name in names if not (cache / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()]

    def listen(self) -> int:
        """Listen on a free port of the node's address, which is returned."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self._server = socket.create_server((self._address, 0), family=family)
        return int(self._server.getsockname()[1])

    def free_port(self) -> int:
        """Return a port of the node's address that is free at present."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        with socket.create_server((self._address, 0), family=family) as server:
            return int(server.getsockname()[1])

    def receive(self, token: bytes, seconds: float) -> Received:
        """Read the data from the node that knows the token.

        Args:
            token: First bytes of the connection; others are closed.
            seconds: How long to read, from the first byte.
        """
        assert self._server is not None, "listen is called first"
        end = time.monotonic() + 2 * CONNECT_TIMEOUT_S
        while (left := end - time.monotonic()) > 0:
            self._server.settimeout(left)
            with contextlib.suppress(OSError):
                connection, _ = self._server.accept()
                with connection:
                    connection.settimeout(CONNECT_TIMEOUT_S)
                    if connection.recv(len(token), socket.MSG_WAITALL) != token:
                        continue
                    buffer, num_bytes, begun = bytearray(_CHUNK_BYTES), 0, time.monotonic()
                    with contextlib.suppress(TimeoutError):
                        while time.monotonic() < begun + seconds and (count := connection.recv_into(buffer)):
                            num_bytes += count
                    if num_bytes:
                        return Received(num_bytes, time.monotonic() - begun)
                    return Received(problem="the connection was made, but no data arrived")
        return Received(problem=f"nothing arrived within {2 * CONNECT_TIMEOUT_S:.0f} s")

    def send(self, address: str, port: int, token: bytes, seconds: float) -> str:
        """Send to another node until it closes the connection, and return why that was not possible; empty if it was.

        Args:
            address: Address of the listening node.
            port: Its port.
            token: First bytes of the connection.
            seconds: How long it reads.
        """
        data = bytes(_CHUNK_BYTES)
        end = time.monotonic() + seconds + 2 * CONNECT_TIMEOUT_S
        try:
            connection = self.connect(address, port)
        except OSError as error:
            return error.strerror or str(error)
        with connection:
            try:
                connection.sendall(token)
                while time.monotonic() < end:
                    connection.sendall(data)
            except ConnectionError:
                return ""
            except OSError as error:
                return error.strerror or str(error)
        return ""

    def connect(self, address: str, port: int) -> socket.socket:
        """Connect to another node."""
        return socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)

    def has_program(self, path: str) -> bool:
        """Return whether a program exists on the node."""
        return os.access(path, os.X_OK)

    def run_ranks(
        self, command: Sequence[str], ranks: Sequence[str], variables: Mapping[str, str], timeout_s: float
    ) -> list[RankEnd]:
        """Run a process for each rank, and wait for all. Their standard inputs are closed when this process ends.

        Args:
            command: Command of all ranks.
            ranks: Last argument of each. Each also sees one of the GPUs that this process sees.
            variables: Environment variables to change; an empty one is removed.
            timeout_s: Limit in seconds; processes that still run are killed.
        """
        gpus = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        # Not `process_environment`: a node without this project runs this code, which arrives whole.
        own = {name: os.path.expandvars(text) for name, text in variables.items()}
        base = {name: text for name, text in {**os.environ, **own}.items() if text}
        end, found = time.monotonic() + timeout_s, []
        with ExitStack() as held:
            processes = []
            for rank, argument in enumerate(ranks):
                own = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if rank < len(gpus) else {}
                # The output goes to files, because nobody reads pipes while the ranks run.
                output, errors = (held.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
                process = held.enter_context(
                    subprocess.Popen(
                        [*command, argument], env=base | own, stdin=subprocess.PIPE, stdout=output, stderr=errors
                    )
                )
                held.callback(process.kill)
                processes.append((process, output, errors))
            for process, output, errors in processes:
                code: int | None = None
                try:
                    code = process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                texts = []
                for file in (output, errors):
                    file.seek(0)
                    texts.append(file.read())
                lines = [line.strip() for line in texts[1].splitlines() if line.strip()]
                found.append(RankEnd(code, texts[0], lines[-1] if lines else ""))
        return found
