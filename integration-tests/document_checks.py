"""Checks of a document without running it: its YAML, commands, links, and the keys and public names in it."""

import ast
import contextlib
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import typer
from typer.core import TyperGroup

from rl_core.config import all_keys
from rl_core.errors import ConfigError
from rl_core.testing.documents import Block, Document, DocumentError, Workbook
from rl_launch.cli.app import app
from rl_launch.commands.explain import roots_of_all
from rl_launch.run_config.reading import read_plan
from rl_launch.submit.profile import PROFILE, TARGETS, belongs_to_profile, read_profile

ROOT = Path(__file__).parents[1]

SMALLEST = (
    "grpo-arithmetic",
    "ppo-tiny",
    "sft-arithmetic",
    "dpo-tiny",
    "rm-tiny",
    "distill-tiny",
    "distill-offline-tiny",
)
"""A recipe of each algorithm."""

_ASSIGNMENT = re.compile(r"^\w+=")
_BETWEEN_COMMANDS = frozenset({"&&", "||", "|", ";", "&"})
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_KEY = re.compile(r"^([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?:=\S*)?$")
_FILE_SUFFIXES = frozenset({".json", ".jsonl", ".log", ".py", ".yaml"})
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_FIRST_CELL = re.compile(r"^\|[^|]*\|", re.MULTILINE)
_NAME = re.compile(r"^rl_[a-z]+(?:[.:]\w+)+$")
_PATH = re.compile(r"^(?P<path>[\w.*-]+(?:/[\w.*-]+)*/?)(?:::(?P<name>[\w:]+))?$")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PACKAGE = r"\brl_(?:algos|core|dtensor|envs|launch|megatron|vllm)\b"
_DOTTED = re.compile(rf"(?P<module>-m )?(?P<name>{_PACKAGE}(?:\.\w+)*(?::[A-Za-z_]\w*)?)(?![\w/])")
_IMPORT = re.compile(rf"from (?P<module>{_PACKAGE}(?:\.\w+)*) import (?:\((?P<many>[^)]*)\)|(?P<few>[\w, ]*))")
_ENTRY_POINT_GROUPS = frozenset({"rl_megatron.families"})
"""Groups of entry points that are named like a module."""

_FENCED = re.compile(r"^ *(`{3,})[^\n]*\n.*?^ *\1`* *$", re.DOTALL | re.MULTILINE)


def check_yaml(block: Block, folder: Path) -> None:
    """Resolve a config, a fragment of one over a recipe, or a profile of `rl submit`.

    Raises:
        DocumentError: if it is not valid.
    """
    keys = set(re.findall(r"^(\w+):", block.text, re.MULTILINE))
    text, path = block.text, folder / f"{block.document.stem}_line_{block.line}.yaml"
    if keys <= set(TARGETS):
        path.write_text(text, encoding="utf-8")
        _read_profile(block, str(path), ())
        return
    if not keys & {"algorithm", "defaults"}:
        text = f"defaults: {block.over or ('sft-squad' if 'sft' in keys else 'grpo-math-8b')}\n{text}"
    path.write_text(text, encoding="utf-8")
    _resolved(block, path, ())


def check_commands(block: Block, folder: Path) -> None:
    """Check each command of a block that is not run: options and config of `rl`, extras of our packages, environments
    of tox, recipes of the justfile, paths to our files.

    Raises:
        DocumentError: naming the command that could not run.
    """
    for words in _commands(block.text):
        while words and _ASSIGNMENT.match(words[0]):
            words = words[1:]
        if words[:2] == ["uv", "run"]:
            words = words[2:]
        if words[:1] == ["rl"]:
            _check_rl(block, words[1:], folder)
        elif words[:1] == ["tox"] and "-e" in words:
            for environment in words[words.index("-e") + 1].split(","):
                _require(environment in _tox_environments(), block, f"tox has no environment {environment}")
        elif words[:1] == ["just"]:
            _check_just(block, words[1:])
        for word in words:
            _check_requirement(block, word)
            if word.endswith(".py") and word.partition("/")[0] in {"benchmarks", "tools", "integration-tests"}:
                _require((ROOT / word).is_file(), block, f"there is no file {word}")


def _tox_environments() -> set[str]:
    settings = tomllib.loads((ROOT / "tox.toml").read_text())
    return {*settings["env_list"], *settings["env"]}


def _check_just(block: Block, words: list[str]) -> None:
    recipes = re.findall(r"^(\w[\w-]*)[^:\n]*:(?!=)", (ROOT / "justfile").read_text(), re.MULTILINE)
    for word in words[:1]:
        _require(word.startswith("-") or word in recipes, block, f"the justfile has no recipe {word}")
    if words[:1] == ["test"]:
        _require(words[1:2] != [] and words[1] in _tox_environments(), block, f"tox has no environment {words[1:2]}")


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in lexer:
            if word in _BETWEEN_COMMANDS:
                yield command
                command = []
            else:
                command.append(word)
        if command:
            yield command


def _check_rl(block: Block, words: list[str], folder: Path) -> None:
    given = _parsed(block, words)
    recipe, overrides = given.get("recipe"), list(given.get("overrides") or ())
    if "=" in str(recipe):  # with --from no recipe need be named
        recipe, overrides = None, [recipe, *overrides]
    if isinstance(recipe, str) and (folder / recipe).exists():
        recipe = folder / recipe
    if words[0] == "submit" and recipe is not None:
        settings = [override for override in overrides if belongs_to_profile(override)]
        _read_profile(block, "", settings)
        overrides = [override for override in overrides if override not in settings]
    elif words[0] not in {"train", "doctor"}:
        return
    if recipe is None or _is_run_of_the_reader(recipe):
        for override in overrides:
            key = str(override).partition("=")[0]
            _require(_is_key(key), block, f"there is no key {key}")
    else:
        _resolved(block, recipe, overrides)


def _is_run_of_the_reader(recipe: str | Path) -> bool:
    """Whether it can only be the folder of a run, which does not exist here."""
    return "/" in str(recipe) and not Path(recipe).exists() and Path(recipe).suffix != ".yaml"


def _parsed(block: Block, words: list[str]) -> dict[str, object]:
    """The parameters that a command of `rl` is given."""
    root, found = typer.main.get_command(app), {}

    def recording(command) -> None:
        for below in getattr(command, "commands", {}).values():
            recording(below)
        if not hasattr(command, "commands"):
            command.callback = lambda **given: found.update(given)

    recording(root)
    try:
        root.main(words, prog_name="rl", standalone_mode=False)
    except Exception as error:  # noqa: BLE001  # click's errors are not all of one kind
        raise DocumentError(f"{block.place}: rl {shlex.join(words)}: {error}") from None
    return found


def _check_requirement(block: Block, word: str) -> None:
    found = re.fullmatch(r"(rl-[a-z]+)(?:\[([a-z,-]+)\])?", word)
    if found is None:
        return
    path = ROOT / "packages" / found[1] / "pyproject.toml"
    _require(path.is_file(), block, f"there is no package {found[1]}")
    extras = tomllib.loads(path.read_text())["project"].get("optional-dependencies", {})
    for extra in (found[2] or "").split(","):
        _require(not extra or extra in extras, block, f"{found[1]} has no extra {extra!r}")


def _resolved(block: Block, recipe: str | Path, overrides) -> None:
    folder = Path(recipe).parent
    if next(folder.glob("*.dist-info"), None) is not None:
        # what is installed there is seen by processes that start there
        command = f"rl config show {shlex.quote(str(recipe))} {shlex.join(overrides)}"
        Workbook(folder).run(Block(block.document, block.line, "sh", command))
        return
    try:
        # files that it names are those of the page
        with contextlib.chdir(folder):
            read_plan(Path(recipe).name if Path(recipe).is_file() else recipe, overrides)
    except ConfigError as error:
        raise DocumentError(f"{block.place}: {error}") from None


def _read_profile(block: Block, name: str, overrides: Sequence[str]) -> None:
    try:
        for target in TARGETS:
            read_profile(target, name, overrides)
    except ConfigError as error:
        raise DocumentError(f"{block.place}: {error}") from None


def install(pyproject: Path) -> None:
    """Make a project known to processes that have its folder on their path, as `pip install -e` would."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    folder = pyproject.parent / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    groups = project.get("entry-points", {}).items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups]
    (folder / "entry_points.txt").write_text("".join(lines), encoding="utf-8")


def _require(condition: bool, block: Block, message: str) -> None:
    if not condition:
        raise DocumentError(f"{block.place}: {message}")


def broken_links(document: Document) -> list[str]:
    """Links to files, figures or headings of this project that do not exist."""
    broken = []
    for link in _LINK.findall(_prose(document.text)):
        name, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = document.path.parent / name if name else document.path
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def _anchors(text: str) -> set[str]:
    headings = _HEADING.findall(_FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unknown_keys(document: Document) -> list[str]:
    """Config keys in the prose that no algorithm has."""
    sections = {key.partition(".")[0] for key in _known_keys()} | set(TARGETS)
    text = _prose(document.text)
    if document.path.name.startswith("coming-from-"):
        text = _FIRST_CELL.sub("", text)  # of another project
    named = [found[1] for code in _INLINE_CODE.findall(text) if (found := _KEY.match(code))]
    keys = [name for name in named if name.partition(".")[0] in sections and Path(name).suffix not in _FILE_SUFFIXES]
    return [key for key in keys if not _is_key(key)]


def _is_key(key: str) -> bool:
    """Whether an algorithm's config, or a profile, has the key."""
    # below a key with free entries, such as policy.optimizer.kwargs, anything goes
    free = {"kwargs", "settings", "env_vars", "custom_parallel_plan", "hf_config_overrides"}
    known = key in _known_keys() or key in all_keys(PROFILE, {})
    return known or bool(free & set(key.split(".")[:-1]))


@cache
def _known_keys() -> frozenset[str]:
    """Keys of every algorithm, with all backends and environments, and those that the smallest recipes choose."""
    roots = [*roots_of_all().values(), *(type(read_plan(recipe).config) for recipe in SMALLEST)]
    return frozenset(key for root in roots for key in all_keys(root, {}))


def missing_places(document: Document) -> list[str]:
    """Files, folders, modules, classes, functions and tests of this project that the prose names and that do not exist.

    A path begins in the checkout, in `packages/` or in the `src` of a package, and may be followed by `::` and the name
    of a test. A dotted name begins with a package (`rl_core.model.Model`). Nothing is imported: the driver's
    environment has no engine.
    """
    return [code for code in _INLINE_CODE.findall(_prose(document.text)) if _is_missing(code)]


def _is_missing(code: str) -> bool:
    if _NAME.match(code):
        return not _is_defined(re.split("[.:]", code))
    found = _PATH.match(code)
    if found is None or "/" not in code or found["path"].split("/")[0] not in _first_names():
        return False
    matches = [path for base in _bases() for path in base.glob(found["path"].rstrip("/"))]
    if found["name"] is None:
        return not matches
    return not any(_defines(path, found["name"].split("::")) for path in matches)


@cache
def _bases() -> tuple[Path, ...]:
    return (ROOT, ROOT / "packages", *ROOT.glob("packages/*/src"))


@cache
def _first_names() -> frozenset[str]:
    """First parts of paths that are this project's; a path of a run or of a reader begins otherwise."""
    return frozenset(path.name for base in _bases() for path in base.iterdir() if path.is_dir())


def _is_defined(parts: Sequence[str]) -> bool:
    """Whether a module has a name, or a class of it has."""
    for base in ROOT.glob("packages/*/src"):
        for length in range(len(parts), 0, -1):
            path = base.joinpath(*parts[:length])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    files = [each for each in (file, file.with_suffix(".pyi")) if each.is_file()]
                    return any(_defines(each, parts[length:]) for each in files)
            if path.is_dir() and length == len(parts):
                return True
    return False


def _defines(file: Path, names: Sequence[str]) -> bool:
    """Whether a file of Python defines or imports a name, or a class in it a name within."""
    body: Sequence[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for name in names:
        found = next((node for node in _statements(body) if name in _names_of(node)), None)
        if found is None:
            return False
        if isinstance(found, ast.ImportFrom):
            return True  # a name of another module, whose attributes are not looked at
        body = found.body if isinstance(found, ast.ClassDef) else ()
    return True


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those of an `if` included: packages import the names that they serve lazily for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body)


def _names_of(node: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case _:
            return set()


def _prose(text: str) -> str:
    return _FENCED.sub("", text)


def text_of_notebook(path: Path) -> str:
    """Return the cells of a notebook as one text."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def private_names(text: str) -> list[str]:
    """Return the dotted names and imports that are not public, or that do not exist.

    Public are the packages with a stub and the names in it. Modules that are started with `python -m` must exist.
    """
    return [*_private_references(text), *_missing_imports(text)]


def _private_references(text: str) -> Iterator[str]:
    for found in _DOTTED.finditer(text):
        exists = _is_module(found["name"]) if found["module"] else _is_public(found["name"])
        if not exists:
            yield found["name"]


def _missing_imports(text: str) -> Iterator[str]:
    public = _public_names()
    for found in _IMPORT.finditer(text):
        module = found["module"]
        names = _imported(found["many"] or found["few"])
        yield from (f"{module}.{name}" for name in names if module in public and name not in public[module])


def _imported(names: str) -> list[str]:
    return [each.partition(" as ")[0].strip() for each in names.split(",") if each.strip()]


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _is_public(name: str) -> bool:
    public = _public_names()
    if name in public or name in _ENTRY_POINT_GROUPS:
        return True
    parts = re.split("[.:]", name)
    packages = [".".join(parts[:count]) for count in range(1, len(parts))]
    package = next((each for each in reversed(packages) if each in public), "")
    return bool(package) and parts[package.count(".") + 1] in public[package]


@cache
def _public_names() -> Mapping[str, frozenset[str]]:
    """The public names of each package and module that has a stub."""
    stubs = [stub.relative_to(source) for source in ROOT.glob("packages/*/src") for stub in source.rglob("*.pyi")]
    modules = [".".join(stub.with_suffix("").parts).removesuffix(".__init__") for stub in stubs]
    return {module: frozenset(importlib.import_module(module).__all__) for module in modules}


def unknown_commands(text: str) -> list[str]:
    """Return the inline code that begins with `rl` and whose command or options do not exist."""
    codes = [" ".join(code.split()) for code in _CODE.findall(_prose(text))]
    return [code for code in codes if code.startswith("rl ") and not _is_command(code.split()[1:])]


def _is_command(words: list[str]) -> bool:
    command = _rl()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            if command is _rl() or type(command) is TyperGroup:
                return False
            break  # a group with a command that it runs by default
        command, words = command.commands[words[0]], words[1:]
    parameters = [
        *command.params,
        *(each for below in getattr(command, "commands", {}).values() for each in below.params),
    ]
    known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return given <= known | {"--help", "-h"}


@cache
def _rl() -> TyperGroup:
    """The command `rl`, made from the annotations of all its commands, which takes a tenth of a second."""
    return typer.main.get_command(app)
