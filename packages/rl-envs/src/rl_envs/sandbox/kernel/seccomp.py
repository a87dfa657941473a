"""A filter on system calls. Calls that let a program leave its sandbox, or that reach seldom-tested parts of the
kernel, fail with EPERM.

The filter knows the calls of Linux up to `NEWEST`; later ones fail with ENOSYS, as on an older kernel.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from rl_envs.sandbox.kernel import syscalls

NEWEST = 462
"""Largest number of a system call that programs may make (mseal, Linux 6.10)."""

Calls = dict[str, tuple[int | None, int | None]]
"""Numbers of calls on x86_64 and on aarch64, None if the machine has no such call; names as in the kernel's tables."""

DENIED: Calls = {
    # network, and sockets of other processes by path
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # other programs, tracing and memory of other processes
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "process_mrelease": (448, 448),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "statmount": (457, 457), "listmount": (458, 458),
    # memory that no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "mlock": (149, 228), "mlock2": (325, 284),
    # such memory, semaphores and queues of other processes, which need not be opened
    "shmctl": (31, 195), "shmdt": (67, 197), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_unlink": (241, 181),
    "mlockall": (151, 230), "move_pages": (279, 239), "migrate_pages": (256, 238), "userfaultfd": (323, 282),
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
    # rules that are kept for each process, without a limit to their number
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # contexts and instances, whose number is limited for all processes of the user or of the machine together
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3),
    "io_getevents": (208, 4), "io_pgetevents": (333, 292), "inotify_init": (253, None), "inotify_init1": (294, 26),
    # parts of the kernel that programs do not need
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "inotify_add_watch": (254, 27), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "lookup_dcookie": (212, 18), "personality": (135, 92), "modify_ldt": (154, None), "uselib": (134, None),
    "seccomp": (317, 277), "lsm_set_self_attr": (460, 460),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58), "mknod": (133, None), "mknodat": (259, 33),
    "sync": (162, 81),
}  # fmt: skip
"""Calls that always fail, with their numbers on x86_64 and aarch64."""

UNSUPPORTED: Calls = {
    # its flags are in memory, which a filter cannot read; libc falls back to clone
    "clone3": (435, 435),
    # programs that read the same library could lock its files; callers treat this error as a filesystem without locks
    "flock": (73, 32),
    # a page in a socket's buffer stays when its file gives it up; callers fall back to read and write
    "sendfile": (40, 71),
}
"""Calls that fail as on a kernel without them."""

WITHOUT_EFFECT: Calls = {
    "syncfs": (306, 267), "fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84),
    "fadvise64": (221, 223),
}  # fmt: skip
"""Calls that succeed and do nothing. They would flush the machine's disks or drop its files from memory, even by a file
that may only be read. A program does not notice: its own files are gone before a power failure could show it."""

CONNECTING = ("socket", "connect")
"""Calls among `DENIED` that a program with an address to reach may make, for streams of IPv4 only."""
EXECUTING = ("execve", "execveat")
"""Calls among `DENIED` that a program with commands to execute may make."""

METADATA: Calls = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
"""Calls that change mode, owner, attributes and times of files, which Landlock does not cover."""

OTHER_PROCESSES: Calls = {
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "get_robust_list": (274, 100),
}  # fmt: skip
"""Calls on processes by their ids. Landlock does not cover most of them. They fail for the program's own threads too;
numerical libraries run all the same if they cannot bind their threads to processors."""

_SPECIAL: Calls = {
    "clone": (56, 220), "socketpair": (53, 199), "prlimit64": (302, 261), "ioctl": (16, 29), "fcntl": (72, 25),
    "fork": (57, None), "vfork": (58, None), "mmap": (9, 222), "madvise": (28, 233), "prctl": (157, 167),
    "setsockopt": (54, 208),
}  # fmt: skip

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_NEW_NAMESPACES = syscalls.CLONE_NEWUSER | syscalls.PROGRAM_NAMESPACES
_TERMINAL, _REQUEST_TYPE_MASK, _TIOCSTI, _TIOCLINUX = 0x5400, 0xFF00, 0x5412, 0x541C
_F_OFD_SETLK, _F_OFD_SETLKW, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 37, 38, 1024, 1026, 1031
_MAP_SHARED, _MAP_TYPE, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x0F, 0x20, 0x40000
_MADV_MERGEABLE = 12
_PR_SET_PDEATHSIG, _PR_SET_THP_DISABLE, _PR_SCHED_CORE, _PR_SET_MEMORY_MERGE = 1, 41, 62, 67
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF = 1, 7, 8
_AF_UNIX, _AF_INET, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 2, 1, 0xF

_LOAD, _EQUAL, _GREATER, _AND, _BITS, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERRNO | errno.EPERM
_NUMBER, _ARCH = 0, 4

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def filter_of(
    machine: str, *, may_fork: bool, has_namespaces: bool, may_connect: bool = False, may_execute: bool = False
) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Args:
        machine: `x86_64` or `aarch64`.
        may_fork: True if programs may start processes; they may start threads in any case.
        has_namespaces: True if a program has its own root and its own process ids, so that it can name neither files
            nor processes of the machine.
        may_connect: True if it may connect streams of IPv4; its network decides to what.
        may_execute: True if it may execute files.
    """
    column = syscalls.MACHINES.index(machine)
    special = {name: numbers[column] for name, numbers in _SPECIAL.items()}
    code = [
        _instruction(_LOAD, _ARCH),
        *_unless(_EQUAL, _AUDIT_ARCH[machine], _KILL),
        _instruction(_LOAD, _NUMBER),
        # This also refuses the x32 calls of x86_64, whose numbers begin at 2**30.
        *_if(_GREATER, NEWEST, _ERRNO | errno.ENOSYS),
    ]
    assert NEWEST < _X32
    granted = {*(CONNECTING if may_connect else ()), *(EXECUTING if may_execute else ())}
    denied = DENIED if has_namespaces else DENIED | METADATA | OTHER_PROCESSES
    for calls, result in ((denied, errno.EPERM), (UNSUPPORTED, errno.ENOSYS), (WITHOUT_EFFECT, 0)):
        for name, numbers in calls.items():
            if (number := numbers[column]) is not None and name not in granted:
                code += _if(_EQUAL, number, _ERRNO | result)
    if not may_fork:
        for name in ("fork", "vfork"):
            if special[name] is not None:
                code += _if(_EQUAL, special[name], _DENY)
    if may_connect:
        code += _call(DENIED["socket"][column], _stream_rule(_AF_INET))
    for name, rule in _rules(may_fork=may_fork, has_namespaces=has_namespaces).items():
        code += _call(special[name], rule)
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def apply(*, may_fork: bool, has_namespaces: bool, may_connect: bool = False, may_execute: bool = False) -> None:
    """Filter the calls of this process and of all that it starts, for good; needs `no_new_privs`. See `filter_of`.

    Raises:
        OSError: If the kernel has no filters, or the machine is not known here.
    """
    machine = platform.machine()
    if machine not in syscalls.MACHINES:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known")
    found = filter_of(
        machine, may_fork=may_fork, has_namespaces=has_namespaces, may_connect=may_connect, may_execute=may_execute
    )
    code = ctypes.create_string_buffer(found)
    count = (len(code) - 1) // 8
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", count, ctypes.addressof(code)))
    syscalls.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _rules(*, may_fork: bool, has_namespaces: bool) -> dict[str, list[bytes]]:
    """Return the rules on the arguments of calls that are allowed otherwise."""
    # A program without a namespace of processes must end when the process that limits it is killed.
    own = () if has_namespaces else (_PR_SET_PDEATHSIG,)
    clone = [_argument(0), *_if(_BITS, _NEW_NAMESPACES, _DENY)]
    if not may_fork:
        clone += _unless(_BITS, _CLONE_THREAD, _DENY)
    # Requests of terminals and streams are allowed; requests of filesystems and networks fail as for any other file.
    ioctl = [
        *_refuse(1, _TIOCSTI, _TIOCLINUX),
        _instruction(_AND, _REQUEST_TYPE_MASK),
        *_unless(_EQUAL, _TERMINAL, _ERRNO | errno.ENOTTY),
    ]
    # Memory that stays when no process has it in its page tables is refused, and pages of the machine's pool.
    mmap = [
        _argument(3),
        *_if(_BITS, _MAP_HUGETLB, _DENY),
        _instruction(_AND, _MAP_TYPE | _MAP_ANONYMOUS),
        *_if(_EQUAL, _MAP_SHARED | _MAP_ANONYMOUS, _DENY),
    ]
    # A socket's buffers stay as they are, as the kernel leaves them at its own limit.
    setsockopt = [
        _argument(1),
        *_unless(_EQUAL, _SOL_SOCKET, _ALLOW),
        _argument(2),
        *_if(_EQUAL, _SO_SNDBUF, _ERRNO),
        *_if(_EQUAL, _SO_RCVBUF, _ERRNO),
    ]
    return {
        "clone": clone,
        "socketpair": _stream_rule(_AF_UNIX),
        "prlimit64": [_argument(0), *_unless(_EQUAL, 0, _DENY)],
        "ioctl": ioctl,
        # A lease delays whoever opens the file, for as long as 45 s; the pages of pipes are counted for each user.
        "fcntl": _refuse(1, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_OFD_SETLK, _F_OFD_SETLKW),
        "mmap": mmap,
        "madvise": _refuse(2, _MADV_MERGEABLE),
        "prctl": _refuse(0, _PR_SET_SECCOMP, _PR_SET_THP_DISABLE, _PR_SCHED_CORE, _PR_SET_MEMORY_MERGE, *own),
        "setsockopt": setsockopt,
    }


def _refuse(index: int, *values: int) -> list[bytes]:
    """Refuse these values of an argument."""
    return [_argument(index), *(part for value in values for part in _if(_EQUAL, value, _DENY))]


def _stream_rule(family: int) -> list[bytes]:
    """Allow streams of one family only: a socket for datagrams could be pointed at any other."""
    return [
        _argument(0),
        *_unless(_EQUAL, family, _DENY),
        _argument(1),
        _instruction(_AND, _SOCK_TYPE_MASK),
        *_unless(_EQUAL, _SOCK_STREAM, _DENY),
    ]


def _call(number: int | None, rule: list[bytes]) -> list[bytes]:
    """Return a rule for one call only. A call that it does not refuse is allowed."""
    assert number is not None
    body = [*rule, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> bytes:
    """Load the lower half of a call's argument; both machines are little-endian."""
    return _instruction(_LOAD, 16 + 8 * index)


def _if(test: int, value: int | None, result: int) -> list[bytes]:
    assert value is not None
    return [_instruction(test, value, 0, 1), _instruction(_RETURN, result)]


def _unless(test: int, value: int, result: int) -> list[bytes]:
    return [_instruction(test, value, 1, 0), _instruction(_RETURN, result)]


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)
