"""The zygote: a small, clean Python process that is forked for each program, so that none waits for an interpreter.

It runs only on the standard library, and has one thread, no environment variables and only its own descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
from dataclasses import replace

from rl_envs.sandbox.confinement import (
    MAX_SLOTS,
    Confinement,
    command_paths,
    enter_namespaces,
    enter_root,
    first_user_id,
    map_user,
    mapped_ids,
    readable_paths,
)
from rl_envs.sandbox.interpreter import PRELOADED, add_builtins
from rl_envs.sandbox.keeper import Site, keep
from rl_envs.sandbox.kernel import syscalls
from rl_envs.sandbox.processes import ProcessTable, delegated
from rl_envs.sandbox.program import Isolation, write_frame
from rl_envs.sandbox.scratch import sweep


def main(control: int, isolation: Isolation, python_path: tuple[str, ...], commands: tuple[str, ...] = ()) -> None:
    """Serve programs; the entry point of the process.

    Each message on the socket carries the connection of one program, which its keeper serves.

    Args:
        control: Descriptor of the socket.
        isolation: Level of isolation.
        python_path: Folders that programs import from.
        commands: Folders of commands that programs may execute.
    """
    with socket.socket(fileno=control) as stream:
        try:
            site = _site(isolation, python_path, commands)
        except OSError as error:
            write_frame(stream, {"problem": str(error)})
            return
        gc.collect()
        gc.freeze()
        write_frame(stream, {"problem": ""})
        _serve(stream, site)


def _site(isolation: Isolation, python_path: tuple[str, ...], commands: tuple[str, ...]) -> Site:
    sweep()
    library = []
    for path in sys.path:
        if path and (os.path.exists(os.path.join(path, "os.py")) or path.endswith(("lib-dynload", ".zip"))):
            library.append(os.path.realpath(path))
    for name in PRELOADED:
        importlib.import_module(name)
    add_builtins()
    table = ProcessTable()
    groups = delegated()
    machines_mounts = os.readlink("/proc/self/ns/mnt")
    folders = tuple(command_paths(commands))
    readable = tuple(readable_paths([*python_path, *folders]))
    confinement = replace(_confinement(isolation, readable, table), executable=folders)
    if isolation == "namespaces":
        # A mount in the machine's own namespace would change the machine.
        if os.readlink("/proc/self/ns/mnt") == machines_mounts:
            raise OSError("it did not get a namespace of mounts of its own")
        enter_root(readable, folders)
    return Site(confinement, table, (*library, *python_path), folders, groups)


def _confinement(isolation: Isolation, readable: tuple[str, ...], table: ProcessTable) -> Confinement:
    """Enter the namespaces of the level, and return the confinement of programs in them.

    Raises:
        OSError: If the machine does not offer the level.
    """
    is_root = os.getuid() == 0
    first = first_user_id(os.getpid(), mapped_ids()) if is_root else None
    if isolation == "namespaces":
        try:
            enter_namespaces(syscalls.CLONE_NEWNS)
        except PermissionError:
            uid, gid = os.getuid(), os.getgid()
            enter_namespaces(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUSER)
            map_user(table, uid, gid)
            return Confinement(isolation, True, None, readable)
        return Confinement(isolation, False, first, readable)
    needed = syscalls.LANDLOCK_COMPLETE
    if isolation == "landlock" and (known := syscalls.landlock_version()) < needed:
        raise OSError(f"Landlock {needed} (Linux 6.12) is needed, and the kernel has {known or 'none'}")
    if is_root and not all(_is_open_to_all(path) for path in readable):
        first = None  # Another user could not read Python's library.
    return Confinement(isolation, False, first, readable)


def _is_open_to_all(path: str) -> bool:
    while path != "/":
        if os.path.isdir(path) and not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True


def _serve(stream: socket.socket, site: Site) -> None:
    keepers: dict[int, int] = {}
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while True:
        # The ends of keepers are not urgent: keepers answer by themselves.
        ready = poll.poll(100 if keepers else None)
        was_killed = False
        while keepers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            was_killed |= os.WIFSIGNALED(status)
            del keepers[pid]
        # A keeper that was killed may have left its program's folder.
        if was_killed and site.confinement.isolation != "namespaces":
            sweep()
        if not ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
        if not message:
            return
        slot = next((slot for slot in range(MAX_SLOTS) if slot not in keepers.values()), None)
        with socket.socket(fileno=descriptors[0]) as connection:
            if slot is None:
                write_frame(connection, {"problem": f"it runs {MAX_SLOTS} programs already"}, [b"", b""])
                continue
            pid = os.fork()
            if pid == 0:
                stream.close()
                _be_keeper(connection, site, slot)
        keepers[pid] = slot


def _be_keeper(connection: socket.socket, site: Site, slot: int) -> None:
    try:
        keep(connection, site, slot)
    except ConnectionError:
        pass
    except BaseException as error:  # noqa: BLE001  # Every failure is reported.
        with contextlib.suppress(OSError):
            write_frame(connection, {"problem": f"{type(error).__name__}: {error}"}, [b"", b""])
    os._exit(0)
