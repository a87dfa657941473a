"""The filter of system calls, run by an interpreter of its instructions for both machines."""

from __future__ import annotations

import errno
import struct

import pytest

from rl_envs.sandbox.kernel import seccomp, syscalls
from rl_envs.sandbox.kernel.seccomp import DENIED, METADATA, OTHER_PROCESSES, UNSUPPORTED, WITHOUT_EFFECT, filter_of

ALLOWED, KILLED = "allowed", "killed"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def result_of(code: bytes, machine: str, number: int, *arguments: int) -> str | int:
    """What the filter answers to a call: `ALLOWED`, `KILLED`, or the number of an error."""
    data = struct.pack("=IIQ6Q", number, ARCHITECTURES[machine], 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    instructions = list(struct.iter_unpack("=HBBI", code))
    position = value = 0
    while True:
        operation, then, otherwise, operand = instructions[position]
        position += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                value &= operand
            case 0x06:
                kinds = {0x7FFF0000: ALLOWED, 0x80000000: KILLED}
                return kinds.get(operand, operand & 0xFFFF)
            case 0x15 | 0x25 | 0x45:
                tests = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}
                position += then if tests[operation] else otherwise


EVERYTHING = {"may_fork": True, "has_namespaces": True, "may_connect": True, "may_execute": True}
NOTHING = {"may_fork": False, "has_namespaces": False, "may_connect": False, "may_execute": False}


@pytest.mark.parametrize("machine", syscalls.MACHINES)
@pytest.mark.parametrize("rights", [EVERYTHING, NOTHING], ids=["everything", "nothing"])
def test_every_call_of_a_table_has_its_result(machine: str, rights: dict[str, bool]) -> None:
    code = filter_of(machine, **rights)
    column = syscalls.MACHINES.index(machine)
    granted = {*seccomp.CONNECTING, *seccomp.EXECUTING} if rights is EVERYTHING else set()
    denied = DENIED if rights is EVERYTHING else DENIED | METADATA | OTHER_PROCESSES
    for table, wanted in ((denied, errno.EPERM), (UNSUPPORTED, errno.ENOSYS), (WITHOUT_EFFECT, 0)):
        for name, numbers in table.items():
            if (number := numbers[column]) is not None and name not in granted:
                assert result_of(code, machine, number) == wanted, name


ANY = 0xDEAD
ARGUMENTS = [
    ("mmap", (0, 4096, 3, 0x22), ALLOWED),
    ("mmap", (0, 4096, 1, 0x01, 5), ALLOWED),  # a file, shared
    ("mmap", (0, 4096, 3, 0x21), errno.EPERM),
    ("mmap", (0, 4096, 3, 0x4021), errno.EPERM),  # with MAP_NORESERVE
    ("mmap", (0, 2**21, 3, 0x40022), errno.EPERM),
    ("mmap", (0, 2**21, 3, 0x22 | 0x40000 | 21 << 26), errno.EPERM),
    ("mmap", (0, 4096, 3, 0x20022), ALLOWED),  # MAP_STACK
    ("madvise", (ANY, 4096, 4), ALLOWED),
    ("madvise", (ANY, 4096, 12), errno.EPERM),
    ("fcntl", (3, 1), ALLOWED),
    ("fcntl", (3, 6), ALLOWED),  # F_SETLK, which databases need
    ("fcntl", (3, 37), errno.EPERM),
    ("fcntl", (3, 38), errno.EPERM),
    ("fcntl", (3, 1024), errno.EPERM),
    ("fcntl", (3, 1026), errno.EPERM),
    ("fcntl", (3, 1030), ALLOWED),  # F_DUPFD_CLOEXEC
    ("fcntl", (3, 1031), errno.EPERM),
    ("ioctl", (0, 0x5401), ALLOWED),
    ("ioctl", (0, 0x5421), ALLOWED),
    ("ioctl", (0, 0x541B), ALLOWED),
    ("ioctl", (0, 0x5451), ALLOWED),
    ("ioctl", (0, 0x5412), errno.EPERM),
    ("ioctl", (0, 0x1_0000_5412), errno.EPERM),  # the upper half is not seen by the kernel
    ("ioctl", (0, 0x541C), errno.EPERM),
    ("ioctl", (0, 0x40086602), errno.ENOTTY),
    ("ioctl", (0, 0x8914), errno.ENOTTY),
    ("setsockopt", (3, 1, 7), 0),
    ("setsockopt", (3, 1, 8), 0),
    ("setsockopt", (3, 1, 2), ALLOWED),
    ("setsockopt", (3, 6, 7), ALLOWED),
    ("prctl", (15, ANY), ALLOWED),
    ("prctl", (4, 0), ALLOWED),
    ("prctl", (22, 2), errno.EPERM),
    ("prctl", (41, 0), errno.EPERM),
    ("prctl", (62, 1), errno.EPERM),
    ("prctl", (67, 1), errno.EPERM),
    ("prlimit64", (0, 7), ALLOWED),
    ("prlimit64", (1, 7), errno.EPERM),
    ("socketpair", (1, 1 | 0x80000), ALLOWED),
    ("socketpair", (1, 2), errno.EPERM),
    ("socketpair", (2, 1), errno.EPERM),
    ("clone", (0x3D0F00,), ALLOWED),
    ("clone", (0x10000000,), errno.EPERM),
]


@pytest.mark.parametrize("machine", syscalls.MACHINES)
@pytest.mark.parametrize(("name", "arguments", "wanted"), ARGUMENTS)
def test_a_call_is_judged_by_its_arguments(
    machine: str, name: str, arguments: tuple[int, ...], wanted: str | int
) -> None:
    number = seccomp._SPECIAL[name][syscalls.MACHINES.index(machine)]
    assert number is not None
    for rights in (EVERYTHING, NOTHING):
        assert result_of(filter_of(machine, **rights), machine, number, *arguments) == wanted


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_rights_open_what_they_say(machine: str) -> None:
    column = syscalls.MACHINES.index(machine)
    everything, nothing = filter_of(machine, **EVERYTHING), filter_of(machine, **NOTHING)

    def asked(name: str, *arguments: int) -> tuple[str | int, str | int]:
        number = {**DENIED, **seccomp._SPECIAL}[name][column]
        assert number is not None
        return tuple(result_of(code, machine, number, *arguments) for code in (everything, nothing))  # type: ignore[return-value]

    assert asked("socket", 2, 1) == (ALLOWED, errno.EPERM)
    assert asked("socket", 2, 2) == (errno.EPERM, errno.EPERM)
    assert asked("connect", 3) == (ALLOWED, errno.EPERM)
    assert asked("execve") == (ALLOWED, errno.EPERM)
    assert asked("clone", 17) == (ALLOWED, errno.EPERM)
    assert asked("prctl", 1, 0) == (ALLOWED, errno.EPERM)  # a death with its parent


def test_calls_of_other_machines_and_later_kernels_are_refused() -> None:
    code = filter_of("x86_64", **EVERYTHING)
    assert result_of(code, "aarch64", 0) == KILLED
    assert result_of(code, "x86_64", 0) == ALLOWED
    assert result_of(code, "x86_64", seccomp.NEWEST + 1) == errno.ENOSYS
    assert result_of(code, "x86_64", 2**30) == errno.ENOSYS
