"""A function or class in one file of a user's own, which no package holds.

It is named as `file.py:Name`. The driver reads the file, and instances of its dataclasses carry its text in their
pickle: a process on any node, in any environment, runs the same file without having it.
"""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
import importlib
import linecache
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

_NAMED = re.compile(r"(?P<file>\S[^:]*\.py):(?P<name>[A-Za-z_][\w.]*)")


@dataclass(frozen=True)
class SourceFile:
    """A file of Python code, with its text.

    Args:
        path: of the file on the driver; it need not exist here.
        text: its contents.
    """

    path: str
    text: str

    @classmethod
    def read(cls, path: str | Path) -> SourceFile:
        """The file as it lies.

        Raises:
            ValueError: if it cannot be read.
        """
        path = Path(path).expanduser().absolute()
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ValueError(f"{path} cannot be read: {reason}") from None

    @cached_property
    def sha256(self) -> str:
        """Of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def module_name(self) -> str:
        """Name of its module: of the file and its text, so that no two texts share one in a process."""
        return f"user_code_{re.sub(r'[^A-Za-z0-9_]', '_', Path(self.path).stem)}_{self.sha256[:16]}"

    def load(self) -> ModuleType:
        """Its module, run once in this process.

        Raises:
            ValueError: if it is not valid Python, or imports what is not installed here.
        """
        known = sys.modules.get(self.module_name)
        if known is not None:
            return known
        module = ModuleType(self.module_name)
        module.__file__ = self.path
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
            raise ValueError(
                f"{self.path} imports {error.name}, which is not installed here. The driver reads the file too: import "
                "what only workers have (such as torch) inside the function that uses it."
            ) from error


_FILES: dict[str, SourceFile] = {}
"""Files that were loaded in this process, by the name of their module."""


def is_in_file(path: str) -> bool:
    """Whether a name is of the form `file.py:Name`."""
    return _NAMED.fullmatch(path) is not None


def beside(path: str, folder: Path) -> str:
    """The name with the file's path from this folder made absolute; any other text as it is."""
    if not is_in_file(path):
        return path
    file, _, name = path.rpartition(":")
    return f"{folder.absolute() / Path(file).expanduser()}:{name}"


def load_module(name: str) -> ModuleType:
    """The module of a file, or of an installed package.

    Raises:
        ValueError: if the file cannot be read or run.
        ModuleNotFoundError: if the module, or something it imports, is not installed.
    """
    return SourceFile.read(name).load() if name.endswith(".py") else importlib.import_module(name)


def implementation_name(owner: Any, path: str) -> str:
    """The name of what an object names as its implementation, as `rl_core.plugins.resolve` takes it.

    Args:
        owner: whose class may be from a file, which travelled with it.
        path: `package.module:function`, or `file.py:function` for one that is in the same file as the class.

    Raises:
        ValueError: if it names another file.
    """
    if not is_in_file(path):
        return path
    file, _, name = path.rpartition(":")
    source = _FILES.get(type(owner).__module__)
    if source is None or Path(source.path).name != Path(file).name:
        raise ValueError(
            f"{type(owner).__name__} names {path}, which is not the file that it is in itself; "
            "a class travels to workers with its own file alone: put both into one file, or the other into a package"
        )
    return f"{source.module_name}:{name}"


def _reduced(instance: Any) -> tuple[Any, ...]:
    """How an instance of a dataclass in a file is pickled: with the file, and its state."""
    kind = type(instance)
    return _blank, (_FILES[kind.__module__], kind.__qualname__), object.__reduce_ex__(instance, 2)[2]


def _blank(source: SourceFile, name: str) -> Any:
    kind = getattr(source.load(), name)
    return kind.__new__(kind)
