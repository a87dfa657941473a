"""The confinement of a program: privileges, limits, Landlock and system calls, in the process that will run it."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from rl_envs.sandbox import landlock, seccomp, syscalls
from rl_envs.sandbox.filesystem import devices
from rl_envs.sandbox.program import Isolation, Limits

FIRST_UID = 1_000_000_000
"""Programs that root starts run under user ids from here on, each under one of its own."""
MAX_SLOTS = 256
"""Maximum number of programs of one sandbox at one time."""

_STACK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Confinement:
    """How programs of one sandbox are confined.

    Args:
        isolation: The level.
        user_namespace: True if the namespaces belong to a user without privileges.
        first_uid: User id of the program in the first slot; None if programs keep that of the sandbox.
        readable: Paths that programs may read.
        executable: Folders among them with commands that programs may execute.
    """

    isolation: Isolation
    user_namespace: bool
    first_uid: int | None
    readable: tuple[str, ...]
    executable: tuple[str, ...] = ()

    @property
    def may_fork(self) -> bool:
        """Return whether programs may start processes: only if their number is limited and none outlives its program.

        The number is not limited for the machine's root, whose programs keep its user id in a user namespace.
        """
        return self.isolation == "limits" or (
            self.isolation == "namespaces" and (self.first_uid is not None or os.getuid() != 0)
        )

    def uid(self, slot: int) -> int:
        """User id of the program in a slot."""
        return os.getuid() if self.first_uid is None else self.first_uid + slot


def first_user_id(owner: int, mapped: Sequence[tuple[int, int]]) -> int:
    """First of `MAX_SLOTS` user ids that no other sandbox of this machine has.

    Args:
        owner: Process id of the sandbox.
        mapped: Ranges of ids that exist here, each its first and their number; a container may have few.
    """
    wanted = FIRST_UID + owner * MAX_SLOTS
    if any(first <= wanted and wanted + MAX_SLOTS <= first + count for first, count in mapped):
        return wanted
    first, count = max(mapped, key=lambda each: each[1])
    # the upper half seldom has users of its own
    room = max(1, count // 2 - MAX_SLOTS)
    return first + count // 2 + owner * MAX_SLOTS % room


def mapped_ids() -> list[tuple[int, int]]:
    """Ranges of user ids that exist here, each its first and their number."""
    try:
        with open("/proc/self/uid_map") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return [(0, 2**32 - 2)]
    return [(int(first), int(count)) for first, _, count in rows]


def confine(confinement: Confinement, limits: Limits, uid: int, scratch: str, port: int = 0) -> None:
    """Confine this process, which must have one thread, for good.

    Args:
        confinement: How.
        limits: Limits of the program.
        uid: User id of the program.
        scratch: Its scratch folder.
        port: TCP port that it may connect to; 0 for none.
    """
    os.umask(0o077)
    os.chdir(scratch)
    _limit(confinement, limits)
    if confinement.isolation != "limits":
        syscalls.drop_bounding_set()
    if confinement.first_uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.die_with_parent()
    if confinement.isolation == "limits":
        return
    syscalls.drop_capabilities()
    syscalls.forbid_new_privileges()
    syscalls.use_small_pages()
    if confinement.isolation == "landlock" or landlock.version():
        existing = devices()
        landlock.restrict(
            readable=[*confinement.readable, *existing],
            writable=[scratch, *existing[:1]],
            executes=bool(confinement.executable),
            port=port,
        )
    seccomp.apply(
        may_fork=confinement.may_fork,
        has_namespaces=confinement.isolation == "namespaces",
        may_connect=bool(port),
        may_execute=bool(confinement.executable),
    )


def _limit(confinement: Confinement, limits: Limits) -> None:
    cpu = math.ceil(limits.cpu_s)
    memory, scratch = limits.memory_mib * 2**20, limits.scratch_mib * 2**20
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (scratch, scratch),
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (64, 64),
        resource.RLIMIT_STACK: (_STACK_BYTES, _STACK_BYTES),
        resource.RLIMIT_NICE: (0, 0),
        resource.RLIMIT_RTPRIO: (0, 0),
    }
    if confinement.isolation == "namespaces" or confinement.first_uid is not None:
        # the processes of a user are counted together, so without a user id or a namespace of its own these would
        # be others' as well
        wanted[resource.RLIMIT_NPROC] = (limits.most_tasks, limits.most_tasks)
    for limit, (soft, hard) in wanted.items():
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(limit, (soft, hard))
