"""A function or class in one file of a user's own, which is not part of a package.

It is named as `file.py:Name`. The driver reads the file, and everything that is sent carries its text: instances of its
dataclasses in their pickle, anything else as `FromFile`. So a process on any node, in any environment, runs the same
file without having it.
"""

from __future__ import annotations

import ast
import copyreg
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import linecache
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rl_core.exports import has_public_names, public_alternatives

_PACKAGE = str(Path(__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_NAMED = re.compile(r"(?P<file>\S[^:]*\.py):(?P<name>[A-Za-z_][\w.]*)")


@dataclass(frozen=True)
class SourceFile:
    """A file of Python code, with its text.

    Args:
        path: Path of the file on the driver; it need not exist here.
        text: Its contents.
    """

    path: str
    text: str

    @classmethod
    def read(cls, path: str | Path) -> SourceFile:
        """Return the file with its present text.

        Raises:
            ValueError: If it cannot be read.
        """
        path = Path(path).expanduser().absolute()
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ValueError(f"{path} cannot be read: {reason}") from None

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def module_name(self) -> str:
        """Name of its module, from the file and its text, so that no two strings share one in a process."""
        return f"user_code_{re.sub(r'[^A-Za-z0-9_]', '_', Path(self.path).stem)}_{self.sha256[:16]}"

    def names(self) -> dict[str, bool] | None:
        """Names that its text defines at its top, with whether each is a function; None if it may define others.

        Raises:
            ValueError: If it is not valid Python.
        """
        names: dict[str, bool] = {}
        for statement in self._tree.body:
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names[name] = True
                case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    names[name] = False
                case ast.Assign(targets=targets) if all(isinstance(each, ast.Name) for each in targets):
                    names |= {each.id: False for each in targets if isinstance(each, ast.Name)}
                case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                    names |= {each.asname or each.name.partition(".")[0]: False for each in imported}
                case ast.Expr():
                    pass
                case _:
                    return None
        return None if "*" in names else names

    def parameters(self, name: str) -> frozenset[str]:
        """Return the names of the parameters of a function that its text defines at its top, or of the method
        `__call__` of such a class; empty for anything else.

        Raises:
            ValueError: If it is not valid Python.
        """
        found: ast.AST | None = next((each for each in self._tree.body if getattr(each, "name", None) == name), None)
        if isinstance(found, ast.ClassDef):
            found = next((each for each in found.body if getattr(each, "name", None) == "__call__"), None)
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return frozenset()
        return frozenset(each.arg for each in (*found.args.args, *found.args.kwonlyargs))

    @cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise ValueError(f"{self.path}:{error.lineno} is not valid Python: {error.msg}") from None

    def load(self) -> ModuleType:
        """Its module, run once in this process.

        Raises:
            ValueError: If it is not valid Python, or imports what is not installed here.
        """
        known = sys.modules.get(self.module_name)
        if known is not None:
            return known
        module = ModuleType(self.module_name)
        module.__file__ = self.path
        folder = str(Path(self.path).parent)
        if folder not in sys.path and Path(folder).is_dir():
            # it may import others beside it; last, so that none of them hides an installed package
            sys.path.append(folder)
        # so that tracebacks show its lines, and `inspect` its source, where the file is not
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
        sys.modules[self.module_name] = module
        try:
            self._run(module)
        except BaseException:
            del sys.modules[self.module_name]
            raise
        _FILES[self.module_name] = self
        for found in vars(module).values():
            if isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == self.module_name:
                copyreg.pickle(found, _reduced)
        return module

    def _run(self, module: ModuleType) -> None:
        try:
            exec(compile(self.text, self.path, "exec"), module.__dict__)
        except SyntaxError as error:
            raise ValueError(f"{self.path}:{error.lineno} is not valid Python: {error.msg}") from None
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package != error.name and has_public_names(package):
                raise ValueError(
                    f"{self.path} imports {error.name}, which does not exist. Import public names from their package "
                    f"(from {package} import ...)."
                ) from error
            raise ValueError(
                f"{self.path} imports {error.name}, which is not installed here ({sys.prefix}). Install it, or import "
                "what only some processes have (such as torch) inside the function that uses it."
            ) from error


@dataclass(frozen=True)
class FromFile:
    """A function or class of a file, to be loaded in another process.

    Args:
        source: The file.
        name: Name of the function or class in it.
    """

    source: SourceFile
    name: str

    @classmethod
    def read(cls, path: str) -> FromFile:
        """Return the function or class of a `file.py:Name`, without running the file.

        Raises:
            ValueError: If the file cannot be read, is not valid Python, or clearly does not define the name.
        """
        file, _, name = path.rpartition(":")
        source = SourceFile.read(file)
        known = source.names()
        if known is not None and name.partition(".")[0] not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it defines {', '.join(known) or 'nothing'}"
            raise ValueError(f"{source.path} has no {name!r}{hint}")
        return cls(source, name)

    @property
    def is_function(self) -> bool:
        """Return whether the file's text says that it is a function."""
        return (self.source.names() or {}).get(self.name, False)

    def load(self) -> Any:
        """Return the function or class; its file runs once in this process. Raises as `SourceFile.load` does."""
        return attrgetter(self.name)(self.source.load())

    def __str__(self) -> str:
        return f"{Path(self.source.path).name}:{self.name}"


def parameters_of(path: str | FromFile) -> frozenset[str]:
    """Return the names of the parameters of a function, without running the file or module that defines it; empty if
    its text does not show them.

    Args:
        path: The function, as `"package.module:function"` or in a file of the user's.
    """
    if isinstance(path, FromFile):
        return path.source.parameters(path.name)
    module, _, name = path.rpartition(":")
    found = importlib.util.find_spec(module)
    if found is None or not (found.origin or "").endswith(".py"):
        return frozenset()
    return SourceFile.read(str(found.origin)).parameters(name)


def place_of(target: Any) -> str:
    """File and line of a function or class, as `reward.py:3`; empty if they are not known."""
    found = inspect.unwrap(target) if callable(target) else target
    if inspect.isfunction(found):
        return f"{Path(found.__code__.co_filename).name}:{found.__code__.co_firstlineno}"
    try:
        file, (_, line) = inspect.getsourcefile(found), inspect.getsourcelines(found)
    except (TypeError, OSError):
        return ""
    return f"{Path(file).name}:{line}" if file else ""


_FILES: dict[str, SourceFile] = {}
"""Files that were loaded in this process, by the name of their module."""


def is_in_file(path: str) -> bool:
    """Return whether a name is of the form `file.py:Name`."""
    return _NAMED.fullmatch(path) is not None


def beside(path: str, folder: Path) -> str:
    """Return the name with an absolute path, from this folder or, if only that has the file, from the current
    one; any other text as it is.
    """
    if not is_in_file(path):
        return path
    written, _, name = path.rpartition(":")
    file = Path(written).expanduser()
    found = folder.absolute() / file
    if not found.exists() and file.exists():
        found = file.absolute()
    return f"{found}:{name}"


def load_module(name: str) -> ModuleType:
    """Import the module of a file, or of an installed package.

    Raises:
        ValueError: If the file cannot be read or run.
        ModuleNotFoundError: If the module, or something it imports, is not installed.
    """
    return SourceFile.read(name).load() if name.endswith(".py") else importlib.import_module(name)


def resolve(path: str) -> Any:
    """Return the object at `"package.module:Name"`, or at `"file.py:Name"` in a user's file.

    Raises:
        ValueError: If the text is not of that form, the module has no such name, or the file cannot be read or run.
        ModuleNotFoundError: If the module, or something it imports, is not installed.
    """
    module, _, attribute = path.rpartition(":")
    if not module or not attribute:
        raise ValueError(f"expected 'package.module:Name' or 'file.py:Name', got {path!r}")
    try:
        found = load_module(module)
    except ModuleNotFoundError as error:
        if hint := _public_instead(module, attribute):
            raise ModuleNotFoundError(f"{error}{hint}", name=error.name) from error
        raise
    try:
        return attrgetter(attribute)(found)
    except AttributeError:
        raise ValueError(f"{module!r} has no {attribute!r}{_public_instead(module, attribute)}") from None


def _public_instead(module: str, attribute: str) -> str:
    alternatives = public_alternatives(module, attribute.partition(".")[0])
    return f"; use {' or '.join(alternatives)}" if alternatives else ""


def implementation_name(owner: Any, path: str) -> str:
    """Return the full name of an object's implementation, as `rl_core.plugins.resolve` takes it.

    Args:
        owner: The object, whose class may be from a file that travelled with it.
        path: `package.module:function`, or `file.py:function` for one that is in the same file as the class.

    Raises:
        ValueError: If it names another file.
    """
    if not is_in_file(path):
        return path
    file, _, name = path.rpartition(":")
    source = _FILES.get(type(owner).__module__)
    if source is None or Path(source.path).name != Path(file).name:
        raise ValueError(
            f"{type(owner).__name__} names {path}, which is in another file than the class; a class is sent to "
            "workers with its own file only: put both into one file, or the other into an installed package"
        )
    return f"{source.module_name}:{name}"


def is_own(file: str) -> bool:
    """Return whether a file of a traceback is neither installed nor of this package."""
    return not file.startswith((_PACKAGE, *_INSTALLED, "<"))


def calls_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the calls of an error's traceback from the first outside this package on; all if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith((_PACKAGE, "<"))), 0)
    return list(frames[first:])


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Context that user code is interrupted in after a time. Threads other than the main one have no limit, because
    signals are handled there only.

    Raises:
        TookTooLong: In the user's code; again every 10 seconds if it catches that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"it took longer than {seconds:g} s (timeout_s)")

    earlier = signal.signal(signal.SIGALRM, interrupt)
    rest = signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *rest)
        signal.signal(signal.SIGALRM, earlier or signal.SIG_DFL)  # None if C code has set it


class TookTooLong(BaseException):
    """User code took longer than its limit. It is not an `Exception`, which user code often catches."""


def raised_at(error: BaseException) -> str:
    """File and line, as `reward.py:3`, of the innermost call in code that is not installed, or else of the innermost
    outside this package; empty if there is none.
    """
    frames = [frame for frame in calls_of(error) if not frame.filename.startswith((_PACKAGE, "<"))]
    own = [frame for frame in frames if is_own(frame.filename)] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _reduced(instance: Any) -> tuple[Any, ...]:
    """How an instance of a dataclass in a file is pickled: with the file, and its state."""
    kind = type(instance)
    return _blank, (_FILES[kind.__module__], kind.__qualname__), object.__reduce_ex__(instance, 2)[2]


def _blank(source: SourceFile, name: str) -> Any:
    kind = getattr(source.load(), name)
    return kind.__new__(kind)
