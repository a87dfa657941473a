"""CUDA code for other architectures leaves a library that is carried to one machine."""

import struct

import carry
import pytest

ELF, PTX = carry.ELF, carry.PTX


def image(kind, arch, content):
    """An image of a fat binary: its header of 64 bytes, then its content."""
    return struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(content), arch) + content


def library(*containers):
    """A library with fat binaries between its other bytes."""
    found = b"\x7fELF"
    for images in containers:
        body = b"".join(image(*each) for each in images)
        found += b"code" + struct.pack("<IHHQ", carry.MAGIC, 1, 16, len(body)) + body
    return found + b"rest"


@pytest.mark.parametrize(
    ("images", "kept"),
    [
        ([(ELF, 80, b"a" * 8), (ELF, 90, b"b" * 8), (PTX, 90, b"c" * 8)], [1]),
        ([(ELF, 80, b"a" * 8), (PTX, 80, b"b" * 8), (PTX, 75, b"c" * 8), (PTX, 100, b"d" * 8)], [1]),
        ([(ELF, 80, b"a" * 8), (ELF, 100, b"b" * 8)], []),
        ([(ELF, 90, b"a" * 8), (ELF, 90, b"b" * 16)], [0, 1]),
    ],
)
def test_what_the_gpu_would_run_is_kept_and_the_rest_is_zeros_of_the_same_length(images, kept):
    blank = [
        (kind, arch, content if index in kept else bytes(len(content)))
        for index, (kind, arch, content) in enumerate(images)
    ]
    other = [(ELF, 90, b"z" * 8)]
    assert carry.pruned(library(images, other), 90) == library(blank, other)


def test_a_library_without_cuda_code_is_as_it_was():
    assert carry.pruned(b"\x7fELF no kernels", 90) == b"\x7fELF no kernels"
