"""Files of a model's checkpoint: written while training continues, digested by their writers, verified by readers."""

from __future__ import annotations

import gc
import hashlib
import io
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from rl_core.errors import MISSING_FILE, CheckpointDamaged, RLError, named
from rl_core.model import SavedFile
from rl_core.torch.process_group import on_all_ranks

SHARDS = "shards"
"""Folder of a model's checkpoint with one file per rank, in the format of torch's distributed checkpoint."""

CHUNK_BYTES = 2**22

WRITERS = 4
"""Maximum number of threads of a rank that write its shard; each writes no faster than a core digests."""

FILE_BYTES = 2**26
"""Minimum number of bytes of a shard for each thread."""

WRITE_TIMEOUT = timedelta(hours=2)
"""Maximum time that a rank may take beyond the others to write its part."""

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_planner_numbers = itertools.count()


def write_checkpoint(
    path: Path,
    tensors: dict[str, Any],
    files: Mapping[str, bytes],
    *,
    group: dist.ProcessGroup,
    planner: KeptSavePlanner,
) -> tuple[SavedFile, ...]:
    """Write this rank's tensors into its shard, tensor by tensor, and its small files; collective.

    Args:
        path: Path of the model's checkpoint; its folders exist.
        tensors: Tensors by name, as `planner` takes them.
        files: Contents by name.
        group: All ranks, on gloo.
        planner: Planner of all saves of these tensors.

    Returns:
        The files that this rank wrote, digested as their bytes went by. They are on the disk.

    Raises:
        RLError: On every rank, if one of them cannot write.
    """
    rank = dist.get_rank()
    writer = DigestingWriter(path / SHARDS)
    small: list[SavedFile] = []

    def write_small() -> None:
        for name, content in files.items():
            with (path / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            small.append(SavedFile(name, len(content), hashlib.sha256(content).hexdigest(), rank))

    with plain_errors(path, "written"):
        try:
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        finally:
            planner.end_planning()
        on_all_ranks(group, write_small)
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
        # The ranks of a pipeline read other tensors.
        warnings.filterwarnings("ignore", message="Detected mismatched keys")
        dcp.load(tensors, checkpoint_id=path / SHARDS, planner=planner, process_group=group)


def verify_files(folder: Path, files: Sequence[SavedFile], group: dist.ProcessGroup) -> None:
    """Compare files with their digests; each is read by one of the ranks, so that together they read them once.

    Args:
        folder: That the files' paths are relative to.
        files: Files with the size and digest that they were written with.
        group: All ranks, on a backend for CPU tensors.

    Raises:
        CheckpointDamaged: On every rank, naming the first file that is missing or differs.
        RLError: On every rank, if one could not be read; its contents may be whole.
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
    # A file that could not be read may be whole, so no checkpoint is given up because of it.
    problems = sorted((each for each in everyone if each is not None), key=lambda e: isinstance(e, CheckpointDamaged))
    if problems:
        raise problems[0]


def _damage(folder: Path, file: SavedFile) -> str:
    path = folder / file.path
    try:
        size = path.stat().st_size
    except MISSING_FILE:
        return f"{file.path} is missing"
    if size != file.size:
        return f"{file.path} has {size} bytes of {file.size}"
    if file.sha256 is None:
        return ""
    digest = hashlib.sha256()
    with named(path), path.open("rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    return "" if digest.hexdigest() == file.sha256 else f"{file.path} has other contents than were saved"


def exported_files(folder: Path, group: dist.ProcessGroup) -> tuple[SavedFile, ...]:
    """List the files of an export that this rank reports; collective.

    Rank 0 reports all it sees; another rank reports only files that rank 0 does not see because the folder is not
    shared. They have no digest: nothing resumes from them.
    """
    rank = dist.get_rank(group)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    seen: list[Any] = [sorted(sizes)]
    dist.broadcast_object_list(seen, src=dist.get_global_rank(group, 0), group=group)
    reported = sizes if rank == 0 else {name: sizes[name] for name in sizes.keys() - set(seen[0])}
    for name in reported:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return tuple(SavedFile(name, size, None, rank) for name, size in sorted(reported.items()))


def deal(files: Sequence[SavedFile], num_shares: int) -> list[list[SavedFile]]:
    """Return the files in shares of about as many bytes, the same on every rank."""
    ordered = sorted(files, key=lambda file: (-file.size, file.path))
    return _dealt(((file, file.size) for file in ordered), num_shares)


def _dealt(sized: Iterable[tuple[_Item, int]], num_shares: int) -> list[list[_Item]]:
    """Return items in shares of about as many bytes: each goes, in this order, to the share of fewest bytes."""
    shares: list[list[_Item]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for item, size in sized:
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += size
    return shares


class KeptSavePlanner(DefaultSavePlanner):
    """Plans a save once, for all later saves of tensors with the same name and place.

    Later saves send nothing to rank 0, which otherwise gathers and compares the items of all ranks (a million for a
    large model on hundreds of ranks). Torch keeps plans per class and process. Here they belong to the object, which is
    used for every save of the same tensors, and `forget` removes them.

    While ranks plan, Python does not look for cycles of garbage: it would visit the million items again and again,
    which takes longer than the plan.

    Args:
        flatten: True if values may be nested dicts, or tensors that only torch knows to be sharded.
    """

    def __init__(self, *, flatten: bool = True) -> None:
        super().__init__(flatten_state_dict=flatten, flatten_sharded_tensors=flatten, enable_plan_caching=True)
        self._cached_plans_key = f"{type(self).__name__} {next(_planner_numbers)}"
        self._collects = False

    def create_local_plan(self) -> SavePlan:
        """Return the items of this rank."""
        self._collects = gc.isenabled()
        gc.disable()
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan that this rank writes, after rank 0 has seen the items of all ranks."""
        self.end_planning()
        return super().finish_plan(new_plan)

    def end_planning(self) -> None:
        """Collect garbage again, also after a plan that failed."""
        if self._collects:
            gc.enable()
        self._collects = False

    def forget(self) -> None:
        """Remove the plans on this rank."""
        for kept in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            kept.pop(self._cached_plans_key, None)


class DigestingWriter(dcp.FileSystemWriter):
    """torch's writer of shards; `written` has the size and SHA-256 of each file, taken as its bytes went by.

    Each of its threads writes one file and holds one tensor in host memory at a time. The base keeps the copies of all
    tensors of a file until its end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        files = _DigestingFileSystem()
        self.fs, self.written = files, files.written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's tensors into one file, or into several if there is much to digest."""
        assert plan.storage_data is not None
        prefix = plan.storage_data.prefix
        parts = [item.tensor_data for item in plan.items]
        sizes = [0 if part is None else part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts]
        dealt = _dealt(zip(plan.items, sizes, strict=True), min(WRITERS, sum(sizes) // FILE_BYTES) or 1)
        shares = [share for share in dealt if share]

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
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result([result for results in written for result in results])
        return done


class _DigestingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            stream = _DigestingStream(cast(io.BufferedWriter, raw))
            yield stream
        self.written[Path(path).name] = stream.size, stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


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


def _write_item(item: WriteItem, planner: SavePlanner, stream: io.IOBase, file_name: str) -> WriteResult:
    """Append one item to a file in the form that torch's reader expects."""
    offset = stream.tell()
    data = planner.resolve_data(item)
    if isinstance(data, Tensor):
        tensor = data.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # `torch.save` would write the whole storage of a view.
        torch.save(tensor, cast(IO[bytes], stream))
    else:
        cast(io.BufferedIOBase, stream).write(data.getbuffer())
    length = stream.tell() - offset
    return WriteResult(item.index, length, _StorageInfo(file_name, offset, length))


class BackgroundSave:
    """This rank's part of a checkpoint that a thread writes, one checkpoint at a time.

    The threads of the ranks talk over their own process group, so that their messages never mix with the collectives
    of training.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[tuple[SavedFile, ...]] | None = None
        self._path = Path()
        self._files: tuple[SavedFile, ...] = ()

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, on gloo, only for writing; made by the first use, which is collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        return self._group

    def begin(self, path: Path, write: Callable[[], tuple[SavedFile, ...]], *, wait: bool) -> None:
        """Write a checkpoint, the one before it being finished.

        Args:
            path: Path, for messages.
            write: Returns the files it has written.
            wait: Write at once, in the calling thread.
        """
        self._files = ()
        if wait:
            self._files = write()
            return
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing, self._path = thread.submit(write), path
        thread.shutdown(wait=False)

    def finish(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """Return the files that this rank wrote for the last checkpoint, None while it is being written.

        Without `wait` it takes part in no collective.

        Raises:
            RLError: If it could not be written, once.
        """
        if self._writing is None:
            return self._files
        if not wait and not self._writing.done():
            return None
        writing, self._writing = self._writing, None
        with plain_errors(self._path, "written"):
            self._files = writing.result()
        return self._files

    def close(self) -> None:
        """Wait for the unfinished save; its failure goes to the log."""
        if self._writing is not None:
            wait_for([self._writing])
            if (error := self._writing.exception()) is not None:
                _log.warning("the checkpoint at %s was not written: %s", self._path, error)


@contextmanager
def plain_errors(path: Path, done: Literal["written", "read"]) -> Iterator[None]:
    """Raise one line with the reason why a checkpoint was not written or read.

    torch's own error is not an `Exception` and would end threads and actors.

    Raises:
        RLError: For an `OSError`, and for errors of torch's distributed checkpoint.
    """
    try:
        yield
    except OSError as error:
        raise RLError(f"the checkpoint at {path} was not {done}: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RLError(
            f"the checkpoint at {path} was not {done}: rank {rank}: {type(cause).__name__}: {cause}"
        ) from error
