"""Files of a model's checkpoint: digested by the rank that writes them, verified by the ranks that read them."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rl_core.errors import CheckpointDamaged, RLError
from rl_core.file_errors import MISSING, named
from rl_core.model import SavedFile
from rl_core.torch.collective_errors import on_all_ranks
from rl_core.torch.training.background_save import plain_errors

SHARDS = "shards"
"""Folder of a model's checkpoint with one file per rank, in the format of torch's distributed checkpoint."""

CHUNK_BYTES = 2**22

WRITERS = 4
"""Maximum number of threads of a rank that write its shard; each writes no faster than a core digests."""

FILE_BYTES = 2**26
"""Minimum number of bytes of a shard for each thread."""


def write_checkpoint(
    path: Path,
    tensors: dict[str, Any],
    files: Mapping[str, bytes],
    *,
    group: dist.ProcessGroup,
    planner: SavePlanner | None = None,
) -> tuple[SavedFile, ...]:
    """Write this rank's tensors into its shard, tensor by tensor, and its small files; collective.

    Args:
        path: Path of the model's checkpoint; its folders exist.
        tensors: Tensors by name, as `planner` takes them.
        files: Contents by name.
        group: All ranks, on gloo.
        planner: Planner of the save; the default of `torch.distributed.checkpoint` if None.

    Returns:
        The files that this rank wrote, digested as their bytes went by. They are on the disk.

    Raises:
        RLError: On every rank, if one of them cannot write.
    """
    rank = dist.get_rank()
    writer = DigestingWriter(path / SHARDS)
    small: list[SavedFile] = []
    with plain_errors(path, "written"):
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        on_all_ranks(group, lambda: small.extend(_write_file(path, name, files[name], rank) for name in files))
    shards = (SavedFile(f"{SHARDS}/{name}", size, digest, rank) for name, (size, digest) in writer.written.items())
    return (*shards, *small)


def read_tensors(
    path: Path, tensors: dict[str, Any], *, group: dist.ProcessGroup, planner: LoadPlanner | None = None
) -> None:
    """Fill tensors in place from the shards of a checkpoint, whatever ranks wrote them; collective.

    Args:
        path: Path of the model's checkpoint.
        tensors: Tensors to fill, by name, as `planner` takes them.
        group: All ranks, on gloo.
        planner: Planner of the load; the default of `torch.distributed.checkpoint` if None.

    Raises:
        RLError: On every rank, if one of them cannot read.
    """
    with warnings.catch_warnings(), plain_errors(path, "read"):
        # the ranks of a pipeline read tensors of other names
        warnings.filterwarnings("ignore", message="Detected mismatched keys")
        dcp.load(tensors, checkpoint_id=path / SHARDS, planner=planner, process_group=group)


def verify_files(folder: Path, files: Sequence[SavedFile], group: dist.ProcessGroup) -> None:
    """Compare files with what was written; each is read by one of the ranks, so that together they read them once.

    Args:
        folder: That the files' paths are relative to.
        files: Files with the size and digest that they were written with.
        group: All ranks, on a backend for CPU tensors.

    Raises:
        CheckpointDamaged: On every rank, naming the first file that is missing or differs.
        RLError: On every rank, if one could not be read, which says nothing about its contents.
    """
    if not files:
        return
    shares = deal(files, dist.get_world_size(group))
    found: RLError | None = None
    try:
        problem = next((problem for file in shares[dist.get_rank(group)] if (problem := _damage(folder, file))), "")
        found = CheckpointDamaged(f"{folder}: {problem}") if problem else None
    except OSError as error:
        found = RLError(f"the checkpoint at {folder} could not be read: {error}")
    everyone: list[RLError | None] = [None] * len(shares)
    dist.all_gather_object(everyone, found, group=group)
    # what could not be read may be whole, so no checkpoint is given up for it
    problems = sorted((each for each in everyone if each is not None), key=lambda e: isinstance(e, CheckpointDamaged))
    if problems:
        raise problems[0]


def exported_files(folder: Path, group: dist.ProcessGroup) -> tuple[SavedFile, ...]:
    """The files of an export, which only this rank sees or leads the others in telling; collective.

    Rank 0 tells of all it sees; another rank tells of what rank 0 does not see, as the folder is not shared. They have
    no digest: nothing resumes from them.
    """
    rank = dist.get_rank(group)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    seen: list[Any] = [sorted(sizes)]
    dist.broadcast_object_list(seen, src=dist.get_global_rank(group, 0), group=group)
    told = sizes if rank == 0 else {name: sizes[name] for name in sizes.keys() - set(seen[0])}
    for name in told:
        _sync(folder / name)
    return tuple(SavedFile(name, size, None, rank) for name, size in sorted(told.items()))


def deal(files: Sequence[SavedFile], num_shares: int) -> list[list[SavedFile]]:
    """Files in shares of about as many bytes, the same on every rank."""
    shares: list[list[SavedFile]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for file in sorted(files, key=lambda file: (-file.size, file.path)):
        least = loads.index(min(loads))
        shares[least].append(file)
        loads[least] += file.size
    return shares


class DigestingWriter(dcp.FileSystemWriter):
    """torch's writer of shards; `written` has the size and SHA-256 of each file, taken as its bytes went by.

    Each of its threads writes one file and holds one tensor in host memory at a time. The base keeps the copies of all
    tensors of a file until its end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = self._files = _DigestingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors into one file, or into several if there is much to digest."""
        assert plan.storage_data is not None
        prefix = plan.storage_data.prefix
        shares = [share for share in _shares(plan.items) if share]

        def write(number: int) -> list[WriteResult]:
            name = f"{prefix}{number}{DEFAULT_SUFFIX}"
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                results = [_write_item(item, planner, stream, name) for item in shares[number]]
                os.fsync(stream.fileno())
            return results

        if len(shares) > 1:
            with ThreadPoolExecutor(len(shares)) as threads:
                written = list(threads.map(write, range(len(shares))))
        else:
            written = [write(number) for number in range(len(shares))]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done

    @property
    def written(self) -> dict[str, tuple[int, str]]:
        """By file name."""
        return {path.name: entry for path, entry in self._files.written.items()}


class _DigestingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[Path, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            stream = _DigestingStream(cast(io.BufferedWriter, raw))
            yield stream
        self.written[Path(path)] = stream.size, stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path)] = self.written.pop(Path(path))


class _DigestingStream(io.RawIOBase):
    """A file that is only ever appended to."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self._raw = raw
        self.size = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        written = self._raw.write(data)
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._raw.flush()
        return self._raw.fileno()

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def close(self) -> None:
        super().close()
        self._raw.close()


def _shares(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Items of about as many bytes for each of the threads, in their order; one share if they are few."""
    sizes = [0 if item.tensor_data is None else _num_bytes(item) for item in items]
    count = min(WRITERS, sum(sizes) // FILE_BYTES) or 1
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    loads = [0] * count
    for item, size in zip(items, sizes, strict=True):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += size
    return shares


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _write_item(item: WriteItem, planner: SavePlanner, stream: io.IOBase, file_name: str) -> WriteResult:
    """Append one item to a file in the form that torch's reader expects."""
    offset = stream.tell()
    data = planner.resolve_data(item)
    if isinstance(data, Tensor):
        tensor = data.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save writes the whole storage behind a view
        torch.save(tensor, cast(IO[bytes], stream))
    else:
        cast(io.BufferedIOBase, stream).write(data.getbuffer())
    length = stream.tell() - offset
    return WriteResult(item.index, length, _StorageInfo(file_name, offset, length))


def _write_file(folder: Path, name: str, content: bytes, rank: int) -> SavedFile:
    with (folder / name).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(name, len(content), hashlib.sha256(content).hexdigest(), rank)


def _damage(folder: Path, file: SavedFile) -> str:
    path = folder / file.path
    try:
        size = path.stat().st_size
    except MISSING:
        return f"{file.path} is missing"
    if size != file.size:
        return f"{file.path} has {size} bytes of {file.size}"
    if file.sha256 is not None and _digest(path) != file.sha256:
        return f"{file.path} has other contents than were saved"
    return ""


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with named(path), path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
