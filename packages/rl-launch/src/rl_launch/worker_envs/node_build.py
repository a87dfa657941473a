"""Building a worker environment on the node where it will be used.

It needs only the standard library: a node that has ray and nothing of this project runs it as a Ray task, sent
whole with `ray.cloudpickle.register_pickle_by_value(rl_launch.worker_envs.node_build)`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# settings of an outer `uv run`, a virtual environment or a project must not affect the environments built here
_FOREIGN = {
    *("CONDA_PREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV"),
    *("UV_BUILD_CONSTRAINT", "UV_COMPILE_BYTECODE", "UV_CONSTRAINT", "UV_EXCLUDE", "UV_FROZEN", "UV_ISOLATED"),
    *("UV_LOCKED", "UV_NO_DEV", "UV_NO_EDITABLE", "UV_NO_SYNC", "UV_ONLY_DEV", "UV_OVERRIDE", "UV_PROJECT"),
    *("UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_REQUIRE_HASHES", "UV_RUN_RECURSION_DEPTH", "UV_SYSTEM_PYTHON"),
    *("UV_WORKING_DIR", "UV_WORKING_DIRECTORY"),
}

_MARKER = "complete.json"
PART_BYTES = 64 << 20
"""Size of the parts that an environment is sent in."""
_OWN = ("pyvenv.cfg", "bin/python*", _MARKER)
"""Files of an environment that depend on its node's interpreter, or are written last."""

_PREFLIGHT = """
import importlib, importlib.metadata, json, sys
want, problems = json.loads(sys.argv[1]), []
python = "{}.{}".format(*sys.version_info[:2])
if python != want["python"]:
    problems.append("it runs Python " + python + ", the driver " + want["python"])
try:
    ray = importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError:
    ray = "none"
if ray != want["ray"]:
    problems.append("it has ray " + ray + ", the driver " + want["ray"])
for name in want["imports"]:
    try:
        importlib.import_module(name)
    except Exception as error:
        problems.append("import " + name + ": " + type(error).__name__ + ": " + str(error))
print("\\npreflight " + json.dumps(problems))
"""

_REPORT = """
import hashlib, importlib, importlib.metadata, importlib.util, json, pathlib, sys
asked = json.loads(sys.argv[1])
found = {"python": "{}.{}".format(*sys.version_info[:2]), "missing": [], "versions": {}, "sources": {}}
try:
    import ray
except Exception as error:
    found["missing"].append("import ray: " + type(error).__name__ + ": " + str(error))
for name in asked["modules"]:
    try:
        if importlib.util.find_spec(name) is None:
            found["missing"].append("the module " + name + " is missing")
    except ImportError as error:
        found["missing"].append("the module " + name + " is missing: " + str(error))
for name in asked["distributions"]:
    try:
        found["versions"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found["versions"][name] = "none"
for name in asked["packages"]:
    spec, digest = importlib.util.find_spec(name), hashlib.sha256()
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(each for each in pathlib.Path(folder).rglob("*.py*") if each.suffix in (".py", ".pyi")):
            digest.update(path.relative_to(folder).as_posix().encode() + bytes(1) + path.read_bytes() + bytes(1))
    found["sources"][name] = digest.hexdigest() if spec else "none"
print("\\nreport " + json.dumps(found))
"""


class EnvBuildError(Exception):
    """Raised if an environment cannot be built or cannot import the modules of its workers, with the reason."""


@dataclass(frozen=True)
class EnvPlan:
    """How to build one environment.

    Args:
        name: Name for folders and logs.
        digest: Digest of everything that decides the contents of the environment.
        commands: Argument lists; `{uv}`, `{env}`, `{python}` (base interpreter), `{env_python}` and `{files}` are
            filled in. The first makes an environment without packages.
        files: Contents by relative path, written where `{files}` points to.
        variables: Environment variables of the commands; `{env}` is filled in.
        cwd: Working folder of the commands; if empty, a neutral folder, so that no project's settings leak in.
        python: Minor version, `3.11`.
        ray: The driver's version.
        imports: Modules that must be importable.
    """

    name: str
    digest: str
    commands: tuple[tuple[str, ...], ...]
    python: str
    ray: str
    imports: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""

    @property
    def folder(self) -> str:
        """Name of the environment's folder under the root."""
        return f"{self.name}-{self.digest[:16]}"


class BuiltEnv(NamedTuple):
    """An environment that has passed its preflight.

    Args:
        python: Its interpreter.
        seconds: Time to build it.
        cached: True if it had been built before.
    """

    python: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class EnvIdentity:
    """The parts of an environment that must equal the driver's so that it can replace it.

    Args:
        modules: Modules that must exist; only ray is imported.
        distributions: Distributions whose versions must be equal.
        packages: Packages of this project whose sources must be equal.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    packages: tuple[str, ...]


@dataclass(frozen=True)
class EnvReport:
    """The contents of an environment, as reported by its own interpreter.

    Args:
        python: Minor version.
        missing: Missing modules, in words.
        versions: Versions by distribution; `none` for one that is not installed.
        sources: Digest by package.
    """

    python: str
    missing: tuple[str, ...]
    versions: Mapping[str, str]
    sources: Mapping[str, str]

    def differences(self, driver: EnvReport) -> list[str]:
        """Return the differences from the driver's environment, in words."""
        problems = list(self.missing)
        if self.python != driver.python:
            problems.append(f"it runs Python {self.python}, the driver {driver.python}")
        for name, version in driver.versions.items():
            if self.versions.get(name) != version:
                problems.append(f"it has {name} {self.versions.get(name)}, the driver {version}")
        changed = [name for name, digest in driver.sources.items() if self.sources.get(name) != digest]
        if changed:
            problems.append(f"its sources of {', '.join(changed)} differ from the driver's")
        return problems


def default_root() -> Path:
    """Return the folder of environments: `envs` in `RL_HOME`, or otherwise in the user's cache folder."""
    home = os.environ.get("RL_HOME")
    if home:
        return Path(home).expanduser() / "envs"
    # a user without a home folder keeps the ~
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "rl" / "envs"


def build(plan: EnvPlan, root: str | None = None, *, parts: Iterable[bytes] | None = None) -> BuiltEnv:
    """Build the environment unless it is complete. A second process that needs the same one waits for the first.

    Args:
        plan: The environment.
        root: Folder of environments; `default_root` if None.
        parts: Parts of the same environment of another node (`pack`), which are unpacked instead of a build.

    Raises:
        EnvBuildError: If a command fails; contains its last lines.
    """
    started = time.monotonic()
    base = Path(root) if root else default_root()
    env = base / plan.folder
    if python := find_built(plan, root):
        return BuiltEnv(python, time.monotonic() - started, cached=True)
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{plan.folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python := find_built(plan, root):
            return BuiltEnv(python, time.monotonic() - started, cached=True)
        # an interrupted build has no marker
        shutil.rmtree(env, ignore_errors=True)
        python = str(env / "bin" / "python")
        try:
            _install(plan, env, base / f"{plan.folder}.files", parts)
            preflight(plan, python)
            aside = env / f"{_MARKER}.part"
            facts = {"name": plan.name, "digest": plan.digest, "imports": list(plan.imports)}
            aside.write_text(json.dumps(facts) + "\n")
            aside.replace(env / _MARKER)
        except BaseException:
            shutil.rmtree(env, ignore_errors=True)
            raise
    return BuiltEnv(python, time.monotonic() - started, cached=False)


def find_built(plan: EnvPlan, root: str | None = None) -> str | None:
    """Return the interpreter of a complete environment; None if it has not been built."""
    env = (Path(root) if root else default_root()) / plan.folder
    python = env / "bin" / "python"
    # the interpreter is a link to one outside, which may have been removed
    return str(python) if (env / _MARKER).is_file() and python.exists() else None


def pack(plan: EnvPlan, root: str | None = None) -> Iterator[bytes]:
    """Yield the path of a complete environment, then its files in parts, without those of its node's interpreter.

    Raises:
        EnvBuildError: If it cannot be read.
    """
    env = (Path(root) if root else default_root()) / plan.folder
    yield str(env).encode()
    command = ["tar", "-c", *(f"--exclude=./{name}" for name in _OWN), "-C", str(env), "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as packing:
        assert packing.stdout is not None
        while part := packing.stdout.read(PART_BYTES):
            yield part
    if packing.returncode:
        raise EnvBuildError(f"tar ended with exit code {packing.returncode} in {env}")


def _unpack(env: Path, parts: Iterable[bytes]) -> None:
    """Add the files of another node's environment to an environment without packages."""
    files = iter(parts)
    origin = next(files)
    with subprocess.Popen(["tar", "-x", "-C", str(env)], stdin=subprocess.PIPE) as unpacking:
        assert unpacking.stdin is not None
        for part in files:
            unpacking.stdin.write(part)
    if unpacking.returncode:
        raise EnvBuildError(f"tar ended with exit code {unpacking.returncode} in {env}")
    for path in (env / "bin").iterdir():
        # Scripts start with the path of the interpreter.
        if not path.is_symlink() and (content := path.read_bytes()).startswith(b"#!"):
            path.write_bytes(content.replace(origin, str(env).encode()))


def preflight(plan: EnvPlan, python: str) -> None:
    """Start an interpreter and import its workers' modules: Ray waits forever for a worker that cannot start.

    The imports also write the bytecode, so that the workers start fast.

    Raises:
        EnvBuildError: If it cannot; lists the problems.
    """
    want = json.dumps({"python": plan.python, "ray": plan.ray, "imports": list(plan.imports)})
    problems = _answer(python, _PREFLIGHT, want, "preflight ")
    if problems:
        raise EnvBuildError("\n".join(problems))


def report(identity: EnvIdentity, python: str) -> EnvReport:
    """Ask an interpreter about its environment; of the heavy packages it imports only ray.

    Raises:
        EnvBuildError: If it does not start.
    """
    found = _answer(python, _REPORT, json.dumps(asdict(identity)), "report ")
    return EnvReport(found["python"], tuple(found["missing"]), found["versions"], found["sources"])


def clean_environment() -> dict[str, str]:
    """Return the variables of this process, without the variables of its virtual environment or uv project."""
    return {key: value for key, value in os.environ.items() if key not in _FOREIGN}


def find_uv() -> str:
    """Find the uv executable: of the installed package, or on the PATH.

    Raises:
        EnvBuildError: If there is none.
    """
    try:
        import uv
    except ModuleNotFoundError:
        found = shutil.which("uv")
        if found is None:
            raise EnvBuildError(f"uv is not installed on this node: {sys.executable} -m pip install uv") from None
        return found
    return str(uv.find_uv_bin())


def base_python(minor: str) -> str:
    """Return the interpreter that environments are made from: the one that made this process's own environment.

    Raises:
        EnvBuildError: If this process runs another minor version.
    """
    here = "{}.{}".format(*sys.version_info[:2])
    if here != minor:
        raise EnvBuildError(f"this node runs Python {here}, the driver {minor}; all nodes need the same version")
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _answer(python: str, script: str, argument: str, mark: str) -> Any:
    """Run a script by an interpreter of another environment, and return the JSON that it prints after a mark."""
    command = [python, "-c", script, argument]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=clean_environment(), timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvBuildError(f"its interpreter does not start: {error}") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    if done.returncode or not answers:
        raise EnvBuildError(f"its interpreter ended with exit code {done.returncode}:\n{_tail(done.stderr)}")
    return json.loads(answers[-1].removeprefix(mark))


def _install(plan: EnvPlan, env: Path, files: Path, parts: Iterable[bytes] | None) -> None:
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    try:
        for relative, content in plan.files.items():
            path = files / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        filled = {
            "uv": find_uv(),
            "env": str(env),
            "python": base_python(plan.python),
            "env_python": str(env / "bin" / "python"),
            "files": str(files),
        }
        variables = {key: value.format(**filled) for key, value in plan.variables.items()}
        options: Any = {"cwd": plan.cwd or str(files), "env": {**clean_environment(), **variables}}
        for words in plan.commands if parts is None else plan.commands[:1]:
            command = [part.format(**filled) for part in words]
            done = subprocess.run(command, **options, capture_output=True, text=True, check=False)
            if done.returncode:
                shown, text = " ".join(["uv", *command[1:3]]), _tail(done.stderr or done.stdout)
                raise EnvBuildError(f"{shown} ended with exit code {done.returncode}:\n{text}")
        if parts is not None:
            _unpack(env, parts)
    finally:
        shutil.rmtree(files, ignore_errors=True)


def _tail(text: str) -> str:
    return "\n".join([line for line in text.strip().splitlines() if line.strip()][-20:]) or "it printed nothing"
