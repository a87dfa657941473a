"""Places that checkpoints are pushed to: a repository of the Hugging Face hub, an object store, or a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core.config import did_you_mean
from rl_core.errors import ConfigError
from rl_core.install_command import install_command

_HUB = re.compile(r"hf://(?P<name>\w[\w.-]*/\w[\w.-]*)", re.ASCII)
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|[?&;](?:[\w-]*(?:key|token|secret|password|sig|signature))=", re.IGNORECASE)
_LIBRARIES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
}

_LOST = ("memory", "data")
"""Schemes of fsspec that keep nothing."""
_ALLOWED = "hf://OWNER/NAME for the Hugging Face hub, s3://BUCKET/FOLDER, gs://... or abfs://..., or file:///FOLDER"
_RECORD = "pushed.json"
"""File in a store that lists what was pushed there."""

_REFUSALS = (400, 401, 403, 404, 409, 413, 422)
"""Answers of the hub that another attempt would get again."""

_STALE = ("*.safetensors", "*.safetensors.index.json")
"""Files of the hub's repository that a push replaces as a whole."""


def destination_of(url: str, *, private: bool = True, by_step: bool = False) -> HubRepository | StoreFolder:
    """Return the destination of an address.

    Args:
        url: `hf://OWNER/NAME`, or a folder as `s3://bucket/folder` or `file:///folder`.
        private: Whether a repository that is made on the hub is private.
        by_step: Whether a store keeps each step in a folder `step_<n>`; the hub keeps each as a commit.

    Raises:
        ValueError: If it is neither.
    """
    if _PASSWORD.search(url):
        raise ValueError(
            "the address contains a password, which logs would show. Give credentials in the environment or in the "
            "files of the store's library"
        )
    if not url.isprintable() or "::" in url:
        raise ValueError(f"got {url!r}: control characters and chains (`::`) are not accepted; allowed: {_ALLOWED}")
    if match := _HUB.fullmatch(url):
        return HubRepository(match["name"], private=private)
    scheme, found, path = url.partition("://")
    if scheme == "hf" or not found or not path:
        raise ValueError(f"got {url!r}; allowed: {_ALLOWED}")
    # imports a part of fsspec
    from fsspec.registry import known_implementations, registry

    if scheme not in (known := {*known_implementations, *registry}):
        near = did_you_mean(scheme, known)
        raise ValueError(f"got {url!r}, whose scheme {scheme!r} is unknown{near}; allowed: {_ALLOWED}")
    if scheme in _LOST:
        raise ValueError(f"got {url!r}: files in {scheme}:// end with the process; allowed: {_ALLOWED}")
    return StoreFolder(url.rstrip("/"), by_step=by_step)


class HubRepository:
    """A model repository of the Hugging Face hub; every push is a commit.

    Args:
        name: `OWNER/NAME`.
        private: Whether it is made private; one that exists stays as it is.

    Attributes:
        url: The address, as users write it.
        loadable_name: The name of the pushed files for `from_pretrained`.
    """

    def __init__(self, name: str, *, private: bool) -> None:
        self.name = self.loadable_name = name
        self.url = f"hf://{name}"
        self._private = private

    def check(self) -> None:
        """Make the repository if it does not exist, and prove that it can be written to.

        Raises:
            ConfigError: If it cannot be, with the remedy.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError

        if hub.is_offline():
            raise ConfigError(
                f"{self.url} needs the network, but HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. Unset it"
            )
        if get_token() is None:
            raise ConfigError(f"{self.url} needs a token with write access. Set HF_TOKEN, or run hf auth login")
        try:
            HfApi().create_repo(self.name, private=self._private, exist_ok=True)
        except HfHubHTTPError as error:
            if self.is_final(error):
                raise ConfigError(
                    f"{self.url} cannot be written to: {_first_line(error)}. Check the name, and whether the token has "
                    "write access"
                ) from None
            raise ConfigError(f"{self.url}: {hub.endpoint()} does not answer: {_first_line(error)}") from None
        except OSError as error:
            raise ConfigError(f"{self.url}: {hub.endpoint()} cannot be reached: {_first_line(error)}") from None

    def upload(self, folder: Path, *, step: int, title: str) -> str:
        """Upload the files of a folder in place of the files of an earlier push, and return the address of the result.

        Args:
            folder: Files of one model.
            step: Step of the checkpoint.
            title: One line for people.
        """
        # takes a while to import, which runs that push nothing should not wait for
        from huggingface_hub import HfApi

        api, stale = HfApi(), list(_STALE)
        api.create_repo(self.name, private=self._private, exist_ok=True)
        api.upload_folder(repo_id=self.name, folder_path=str(folder), commit_message=title, delete_patterns=stale)
        return f"{hub.endpoint()}/{self.name}"

    def is_final(self, error: Exception) -> bool:
        """Return whether another attempt would fail alike."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        return status in _REFUSALS or isinstance(error, ValueError)


class StoreFolder:
    """A folder in an object store or a file system, reached through fsspec; see `HubRepository`.

    Args:
        url: Address of the folder.
        by_step: Whether each step has its own folder below it.
    """

    loadable_name = "FOLDER"
    """Stands for a copy of the folder."""

    def __init__(self, url: str, *, by_step: bool) -> None:
        self.url = url
        self._by_step = by_step

    def check(self) -> None:
        """See `HubRepository.check`. Writes a small file and removes it again."""
        try:
            system, path = self._opened()
            system.makedirs(path, exist_ok=True)
            system.pipe_file(f"{path}/.push_check", b"")
            system.rm_file(f"{path}/.push_check")
        except ImportError as error:
            scheme = self.url.partition("://")[0]
            library = _LIBRARIES.get(scheme)
            remedy = install_command(library) if library else str(error)
            raise ConfigError(f"{self.url} needs a library that is not installed: {remedy}") from None
        except Exception as error:  # noqa: BLE001  # of any library that a store is reached through
            raise ConfigError(
                f"{self.url} cannot be written to ({type(error).__name__}: {_first_line(error)}). Check the address "
                "and its credentials"
            ) from None

    def upload(self, folder: Path, *, step: int, title: str) -> str:
        """See `HubRepository.upload`. The config is written last, so that a reader never takes a part for the whole."""
        system, path = self._opened()
        target = f"{path}/step_{step}" if self._by_step else path
        files = [each for each in folder.rglob("*") if each.is_file()]
        sizes = {each.relative_to(folder).as_posix(): each.stat().st_size for each in files}
        earlier = _recorded(system, target)
        system.makedirs(target, exist_ok=True)
        for name in sorted(sizes, key=lambda name: (name.endswith("config.json"), name)):
            if "/" in name:
                system.makedirs(f"{target}/{name.rpartition('/')[0]}", exist_ok=True)
            system.put_file(str(folder / name), f"{target}/{name}")
        for name in earlier.keys() - sizes.keys():
            system.rm_file(f"{target}/{name}")
        system.invalidate_cache()
        for name, size in sizes.items():
            if (found := system.info(f"{target}/{name}")["size"]) != size:
                raise OSError(f"{name} has {found} of {size} bytes in {target}")
        record = {"step": step, "title": title, "files": sizes}
        system.pipe_file(f"{target}/{_RECORD}", json.dumps(record, indent=1).encode())
        return f"{self.url}/step_{step}" if self._by_step else self.url

    def is_final(self, error: Exception) -> bool:
        """See `HubRepository.is_final`."""
        return isinstance(error, ImportError | PermissionError | NotADirectoryError | ValueError)

    def _opened(self) -> tuple[Any, str]:
        # imports the libraries of stores
        import fsspec

        system, path = fsspec.core.url_to_fs(self.url)
        return system, path.rstrip("/")


def _recorded(system: Any, target: str) -> Mapping[str, int]:
    """Return the files of an earlier push into a folder, with their sizes; none of files that somebody else wrote."""
    try:
        files = json.loads(system.cat_file(f"{target}/{_RECORD}"))["files"].items()
        return {name: int(size) for name, size in files if ".." not in name.split("/") and not os.path.isabs(name)}
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
