"""A Python script, read statement by statement without being run.

Each statement is given a `ScriptLine`: it is converted, listed for the user to check, refused, or it does not act on
anything that training depends on. A statement that acts on such a value in a way that is not known is listed.
"""

from __future__ import annotations

import ast
import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_launch.foreign.translation import Fate, ScriptLine
from rl_launch.foreign.trl.values import (
    SCRIPTS,
    TRACKED,
    Data,
    Thing,
    folded,
    is_constant,
    is_made,
    parts_of,
    role_of,
    touched,
    unknown,
)

_MAX_DEPTH = 8
_MAX_ROUNDS = 16
_GLOBALS = " globals"
"""Entry of a scope for the names that belong to the module; no name has a space."""
_MUTABLE = TRACKED - {"data"}
_PURE = SCRIPTS["pure"].split()
_HARMLESS = frozenset(SCRIPTS["harmless"].split())
HARMLESS_VARIABLES = tuple(SCRIPTS["harmless variables"].split())
"""Beginnings of the names of environment variables that change no training."""
_FOLDED: Mapping[str, Callable[..., Any]] = {
    "Path": lambda *parts: "/".join(map(str, parts)),
    "abs": abs, "bool": bool, "dict": dict, "float": float, "int": int, "len": len, "list": list, "max": max,
    "min": min, "range": range, "round": round, "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple,
    "pathlib.Path": lambda *parts: "/".join(map(str, parts)), "os.path.join": os.path.join,
    "os.path.expanduser": lambda path: path,
}  # fmt: skip
"""Functions whose result is known if their arguments are."""
_CONVERSIONS: Mapping[int, Callable[[Any], Any]] = {-1: lambda value: value, 97: ascii, 114: repr, 115: str}
_TEXT_METHODS = ("capitalize", "format", "join", "lower", "lstrip", "replace", "rstrip", "split", "strip", "upper")


@dataclass
class Call:
    """A call in a script.

    Args:
        name: Name of the function, without modules.
        node: The call.
        positional: Values of positional arguments.
        given: Values of keywords.
        extra: True if it has arguments in `*` or `**` that are not known.
    """

    name: str
    node: ast.Call
    positional: list[Any] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    extra: bool = False

    def named(self, *names: str) -> Call:
        """Return the call with its positional arguments under these names."""
        places = dict(zip(names, self.positional, strict=False))
        return replace(self, positional=self.positional[len(names) :], given={**places, **self.given})

    def line(self, key: str) -> int:
        """Return the line of an argument."""
        return next((each.value.lineno for each in self.node.keywords if each.arg == key), self.node.lineno)

    @property
    def values(self) -> list[Any]:
        """The values of all arguments."""
        return [*self.positional, *self.given.values()]

    @property
    def first(self) -> Any:
        """The first positional argument; None if there is none."""
        return self.positional[0] if self.positional else None


class ScriptReading:
    """State of a script that is being read.

    Args:
        source: Text of the script.
        folder: Its folder.
        flags: Arguments of the command line that starts it; None if it is not known.
        calls: Functions for the calls that are known, by name.
        methods: Functions for the methods that are known, by the role of their object.
        set_known: Assigns an attribute of a value that training depends on.
    """

    def __init__(
        self,
        source: str,
        folder: Path,
        flags: Mapping[str, Any] | None,
        *,
        calls: Mapping[str, Callable[[ScriptReading, Call], Any]],
        methods: Mapping[str, Callable[[ScriptReading, Any, Call], Any]],
        set_known: Callable[[ScriptReading, Any, str, Any], None],
    ) -> None:
        self.folder = folder
        self.flags = flags
        self.lines: dict[tuple[int, int], ScriptLine] = {}
        self.checks: list[ScriptLine] = []
        self.refused: list[ScriptLine] = []
        self.trainers: list[Thing] = []
        self.configs: list[Thing] = []
        self.others: dict[str, int] = {}
        self.is_trained = False
        self._made_in: dict[int, ast.stmt] = {}
        self._text = source.splitlines()
        self._scopes: list[dict[str, Any]] = [{}]
        self._returned: list[Any] = []
        self._calls, self._methods, self._set_known = calls, methods, set_known
        self._said: list[tuple[Fate, str]] = []
        self._touched: set[str] = set()
        self._here: ast.stmt = ast.Pass(lineno=1, col_offset=0)
        self._called: set[int] = set()

    # What is reported

    def say(self, fate: Fate, text: str, *, line: int = 0) -> None:
        """Record the fate of the present statement.

        Args:
            fate: The fate; the largest of a statement counts.
            text: Keys, reason or feature.
            line: Line that is listed, if it is not the first one of the statement.
        """
        if self.is_trained and fate > Fate.CONVERTED:
            fate, text = Fate.UNRELATED, "it is after the training"
        self._said.append((fate, text))
        number = line or self._here.lineno
        listed = {Fate.CHECK: self.checks, Fate.REFUSED: self.refused}.get(fate, [])
        if (said := ScriptLine(number, self._text[number - 1].strip(), fate, text)) not in listed:
            listed.append(said)

    def computed(self, value: Any) -> str:
        """Return the lines that computed a value, in words, and mark those lines as listed."""
        numbers = sorted({line for each in parts_of(value) if isinstance(each, Thing) for line in each.lines})
        for key, line in self.lines.items():
            if line.number in numbers and line.fate < Fate.CHECK:
                self.lines[key] = replace(line, fate=Fate.CHECK, reason="a value that the script computes")
        numbers = [line for line in numbers if line != self._here.lineno]
        if not numbers:
            return ""
        return f", from line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

    @contextmanager
    def at(self, node: ast.AST) -> Iterator[None]:
        """Record the fate of the statement that contains a call."""
        self._here, self._said = self._made_in[id(node)], []
        yield
        if self._said:
            self._account(self._here)

    # Statements

    def run(self, body: Iterable[ast.stmt]) -> None:
        """Read statements in their order."""
        for statement in body:
            outer = self._here, self._said, self._touched
            self._here, self._said, self._touched = statement, [], set()
            getattr(self, f"_{type(statement).__name__.lower()}", self._generic)(statement)
            self._account(statement)
            self._here, self._said, self._touched = outer

    def run_uncalled(self) -> None:
        """Read the functions that the script never calls and that create a trainer; a library calls them."""
        for value in list(self._scopes[0].values()):
            is_uncalled = role_of(value) == "function" and id(value.node) not in self._called
            called = [node.func for node in ast.walk(value.node) if isinstance(node, ast.Call)] if is_uncalled else []
            if any(getattr(each, "id", getattr(each, "attr", "")).endswith("Trainer") for each in called):
                self._here = value.node
                self._inlined(value, dict(self.flags or {}))

    def _account(self, statement: ast.stmt) -> None:
        acts = self._touched & _MUTABLE and not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.If)
        if not self._said and acts:
            self.say(Fate.CHECK, f"acts on the {_listed(self._touched & TRACKED)}, and is not read")
        fate = max((each for each, _ in self._said), default=Fate.UNRELATED)
        reasons = dict.fromkeys(text for each, text in self._said if each is fate)
        self._mark(statement, fate, "; ".join(reasons) if self._said else "it does not act on the training")

    def _mark(self, statement: ast.stmt, fate: Fate, reason: str) -> None:
        key = (statement.lineno, statement.col_offset)
        if key not in self.lines or self.lines[key].fate <= fate:
            self.lines[key] = ScriptLine(statement.lineno, self._text[statement.lineno - 1].strip(), fate, reason)

    def _skipped(self, body: Iterable[ast.stmt], reason: str) -> None:
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.stmt):
                self._mark(node, Fate.UNRELATED, reason)

    def _generic(self, statement: ast.stmt) -> None:
        for node in ast.iter_child_nodes(statement):
            if isinstance(node, ast.expr):
                self.value(node)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        module = f"{statement.module or ''}." if isinstance(statement, ast.ImportFrom) else ""
        for alias in statement.names:
            if alias.name == "*":
                self.say(Fate.CHECK, "imports names that cannot be followed")
            name = alias.name if module or alias.asname else alias.name.partition(".")[0]
            self._scopes[-1][alias.asname or name] = Thing("import", module + name)
        self.say(Fate.UNRELATED, "an import")

    _importfrom = _import

    def _functiondef(self, statement: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scopes[-1][statement.name] = Thing("function", statement.name, node=statement)
        self.say(Fate.UNRELATED, "the definition of a function, which is read where it is called")
        self._skipped(statement.body, "a line of a function that is not called")

    _asyncfunctiondef = _functiondef

    def _classdef(self, statement: ast.ClassDef) -> None:
        parents = [self.value(base) for base in statement.bases]
        base = next((each.last_name for each in parents if isinstance(each, Thing)), "")
        defaults: dict[str, Any] = {}
        for each in statement.body:
            match each:
                case ast.AnnAssign(target=ast.Name(id=name), value=None):
                    defaults[name] = unknown(name="a field without a default")
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Name() | ast.Attribute()) as made):
                    keywords = {keyword.arg: keyword.value for keyword in made.keywords}
                    factory = keywords.get("default_factory")
                    default = factory.body if isinstance(factory, ast.Lambda) else None
                    default = keywords.get("default", default)
                    defaults[name] = unknown() if default is None else self.value(default)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    defaults[name] = self.value(value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    defaults[name] = self.value(value)
        self._scopes[-1][statement.name] = Thing("class", base or statement.name, parts=defaults, node=statement)
        self.say(Fate.UNRELATED, "the definition of a class")
        self._skipped(statement.body, "a line of a class, which is read where it is used")

    def _assign(self, statement: ast.Assign) -> None:
        value = self.value(statement.value)
        for target in statement.targets:
            self.bind(target, value)
        if not self._said and is_constant(value) and all(isinstance(each, ast.Name) for each in statement.targets):
            self.say(Fate.UNRELATED, "a constant, which is read where it is used")

    def _annassign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            self.bind(statement.target, self.value(statement.value))

    def _augassign(self, statement: ast.AugAssign) -> None:
        value = folded(statement.op, self.value(statement.target), self.value(statement.value))
        self.bind(statement.target, value)

    def bind(self, target: ast.expr, value: Any) -> None:
        """Assign a value to a name, an attribute, an entry or several of them."""
        if isinstance(value, Thing) and not value.role:
            value = replace(value, lines=tuple(sorted({*value.lines, self._here.lineno})))
        match target:
            case ast.Name(id=name):
                is_global = name in self._scopes[-1].get(_GLOBALS, ())
                self._scopes[0 if is_global else -1][name] = value
            case ast.Starred(value=inner):
                self.bind(inner, unknown(value))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                several = list(value) if isinstance(value, list | tuple) and len(value) == len(targets) else None
                for place, each in enumerate(targets):
                    self.bind(each, several[place] if several else unknown(value))
            case ast.Attribute(value=owner, attr=name):
                self.set_attribute(self.value(owner), name, value)
            case ast.Subscript(value=owner, slice=index):
                self._set_entry(self.value(owner), self.value(index), value)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Assign an attribute, and account for its effect."""
        role = role_of(owner)
        if name == "requires_grad":
            self._freeze(value)
        elif role in SCRIPTS["attributes"]:
            self._set_known(self, owner, name, value)
        elif role in ("import", "class"):
            module = owner.name.partition(".")[0]
            if module in ("trl", "transformers", "peft", "accelerate", "datasets") or owner.name.endswith("Trainer"):
                self.say(Fate.REFUSED, f"code of {module} that is replaced ({owner.last_name}.{name})")
            elif "backends" in owner.name:
                self.say(Fate.UNRELATED, "kernels are chosen by the backend")
            else:
                self.say(Fate.CHECK, f"changes {owner.name}.{name} for everything that runs after it")
        elif role in ("options", "instance"):
            owner.parts[name] = value
        elif touched(owner):
            self.say(Fate.CHECK, f"sets {name} of a value of the {_listed(touched(owner))}")
        elif isinstance(owner, Thing) and not role:
            owner.lines = (*owner.lines, self._here.lineno)  # it counts if the object is used

    def _freeze(self, value: Any) -> None:
        if value is True:
            self.say(Fate.CHECK, "which parameters are trained follows from policy.lora_cfg and policy.vision")
        else:
            self.say(Fate.REFUSED, "training only some of the parameters (requires_grad)")

    def _set_entry(self, owner: Any, key: Any, value: Any) -> None:
        if isinstance(owner, Thing) and owner.name == "os.environ":
            self._set_variable(key, value)
        elif isinstance(owner, dict) and isinstance(key, str | int):
            owner[key] = value
        elif role_of(owner) == "splits" and isinstance(key, str):
            owner.parts[key] = value
        elif isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            owner[key] = value
        elif roles := touched(owner, value):
            self.say(Fate.CHECK, f"changes an entry of the {_listed(roles)}")

    def _set_variable(self, name: Any, value: Any) -> None:
        if isinstance(name, str) and name.startswith(HARMLESS_VARIABLES):
            self.say(Fate.UNRELATED, "the variable does not change the training; set it in the shell")
        else:
            self.say(Fate.CHECK, "an environment variable. Set it in policy.env_vars or in the shell if it matters")

    def _return(self, statement: ast.Return) -> None:
        self._returned.append(None if statement.value is None else self.value(statement.value))

    def _expr(self, statement: ast.Expr) -> None:
        if isinstance(statement.value, ast.Constant):
            self.say(Fate.UNRELATED, "a comment")
            return
        self.value(statement.value)
        if isinstance(statement.value, ast.Call) and not self._said and not self._touched:
            name = self.dotted(statement.value.func)
            known = name in _PURE or name == "main"
            self.say(Fate.UNRELATED if known else Fate.CHECK, f"calls {name or 'a function'}, which is not read")

    def _if(self, statement: ast.If) -> None:
        test = self._truth(statement.test)
        if isinstance(test, bool):
            holds, left = (statement.body, statement.orelse) if test else (statement.orelse, statement.body)
            self.run(holds)
            self._skipped(left, "its condition does not hold")
            self._said = [(Fate.UNRELATED, "its condition is known without running the script")]
            return
        trained = self.is_trained
        fates, others = self._inside(statement.body), self._branch(statement.orelse, trained=trained)
        if max(fates, others) > Fate.UNRELATED:
            taken = "the first branch is" if others > Fate.UNRELATED else "the lines below it are"
            self._decided(f"is decided when the script runs; {taken} read as if the condition holds", trained=trained)

    def _branch(self, body: list[ast.stmt], *, trained: bool) -> Fate:
        """Read a branch that is not taken: its lines are accounted for, and its assignments are dropped.

        Args:
            body: Statements of the branch.
            trained: True if the script has trained before the branch.
        """
        kept = [dict(scope) for scope in self._scopes]
        trainers, configs, trains = list(self.trainers), list(self.configs), self.is_trained
        num_returned, self.is_trained = len(self._returned), trained
        found = self._inside(body)
        for scope, before in zip(self._scopes, kept, strict=True):
            scope.update(before)
        del self._returned[num_returned:]
        if trainers or trains:
            self.trainers, self.configs, self.is_trained = trainers, configs, trains
        return found

    def _inside(self, body: list[ast.stmt]) -> Fate:
        """Read the body of a statement and return the largest fate of its statements."""
        self.run(body)
        nodes = (node for each in body for node in ast.walk(each) if isinstance(node, ast.stmt))
        keys = {(node.lineno, node.col_offset) for node in nodes}
        return max((self.lines[key].fate for key in keys if key in self.lines), default=Fate.UNRELATED)

    def _truth(self, test: ast.expr) -> Any:
        match test:
            case ast.Compare(left=ast.Name(id="__name__")):
                return True
            case ast.Name(id="TYPE_CHECKING"):
                return False
        value = self.value(test)
        return bool(value) if is_constant(value) else True if is_made(value) else value

    def _for(self, statement: ast.For | ast.AsyncFor) -> None:
        several = self.value(statement.iter)
        if isinstance(several, list | tuple | range) and 0 < len(several) <= _MAX_ROUNDS:
            for each in several:
                self.bind(statement.target, each)
                self.run(statement.body)
            self.run(statement.orelse)
            self.say(Fate.UNRELATED, "the lines below it are read for each value")
        else:
            self.bind(statement.target, several if role_of(several) == "model" else unknown(several))
            self._loop(statement.body + statement.orelse)

    _asyncfor = _for

    def _while(self, statement: ast.While) -> None:
        self.value(statement.test)
        self._loop(statement.body + statement.orelse)

    def _loop(self, body: list[ast.stmt]) -> None:
        self._touched.clear()
        trained = self.is_trained
        if self._inside(body) > Fate.UNRELATED:
            self._decided("repeats lines that are read once", trained=trained)

    def _decided(self, text: str, *, trained: bool) -> None:
        """List the header of lines that act on the training, even if they train."""
        trains, self.is_trained = self.is_trained, trained
        self.say(Fate.CHECK, text)
        self.is_trained = trains

    def _match(self, statement: ast.Match) -> None:
        self.value(statement.subject)
        trained = self.is_trained
        fates = [self._inside(statement.cases[0].body)]
        fates += [self._branch(case.body, trained=trained) for case in statement.cases[1:]]
        if max(fates) > Fate.UNRELATED:
            self._decided("is decided when the script runs; its first case is read", trained=trained)

    def _with(self, statement: ast.With | ast.AsyncWith) -> None:
        for item in statement.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value)
        if not self._said:
            self.say(Fate.UNRELATED, "the lines below it are read in order")
        self.run(statement.body)

    _asyncwith = _with

    def _try(self, statement: ast.Try) -> None:
        self.run(statement.body)
        self.run(statement.orelse)
        for handler in statement.handlers:
            if self._branch(handler.body, trained=self.is_trained) > Fate.UNRELATED:
                self.say(Fate.CHECK, f"lines after `except` in line {handler.lineno} act on the training")
        self.run(statement.finalbody)
        self.say(Fate.UNRELATED, "the lines below it are read in order")

    def _assert(self, statement: ast.stmt) -> None:
        self._generic(statement)
        self._touched.clear()
        self.say(Fate.UNRELATED, "a check of the script")

    _raise = _delete = _pass = _nonlocal = _break = _continue = _assert

    def _global(self, statement: ast.Global) -> None:
        self._scopes[-1].setdefault(_GLOBALS, set()).update(statement.names)
        self.say(Fate.UNRELATED, "names of the module")

    # Expressions

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, and record which tracked values it reads."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._read(self._named(name))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                found: list[Any] = []
                for element in elements:
                    value = self.value(element.value if isinstance(element, ast.Starred) else element)
                    is_several = isinstance(element, ast.Starred) and isinstance(value, list | tuple)
                    found += list(value) if is_several else [value]
                return found
            case ast.Dict(keys=keys, values=values):
                return self._dictionary(keys, values)
            case ast.JoinedStr(values=values):
                parts = [self._formatted(each) for each in values]
                return "".join(parts) if is_constant(parts) else unknown(*parts)
            case ast.BinOp(left=left, op=kind, right=right):
                return folded(kind, self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                return folded(kind, self.value(left), self.value(right))
            case ast.UnaryOp(op=kind, operand=operand):
                value = self.value(operand)
                if isinstance(kind, ast.Not):
                    return not value if is_constant(value) else False if is_made(value) else unknown(value)
                number = isinstance(value, int | float)
                return unknown(value) if not number else -value if isinstance(kind, ast.USub) else value
            case ast.BoolOp(op=kind, values=values):
                several = [self.value(each) for each in values]
                for value in several:
                    if not is_constant(value) and not is_made(value):
                        return unknown(*several)
                    if bool(value if is_constant(value) else True) is isinstance(kind, ast.Or):
                        return value
                return several[-1]
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = self._truth(test)
                if isinstance(truth, bool):
                    return self.value(body if truth else orelse)
                return unknown(self.value(body), self.value(orelse), truth)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.value(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return self._entry(self.value(owner), self.value(index))
            case ast.Call():
                return self.call(node)
            case ast.NamedExpr(target=target, value=inner):
                value = self.value(inner)
                self.bind(target, value)
                return value
            case ast.ListComp(elt=element, generators=[ast.comprehension(target=target, iter=iterated, ifs=[])]):
                return self._comprehension(element, target, self.value(iterated))
            case ast.Lambda():
                return Thing("function", "a lambda", node=node)
            case ast.Slice():
                bounds = [None if each is None else self.value(each) for each in (node.lower, node.upper, node.step)]
                return slice(*bounds) if is_constant(bounds) else unknown(*bounds)
            case _:
                return unknown(*[self.value(each) for each in ast.walk(node) if isinstance(each, ast.Name)])

    def _formatted(self, node: ast.expr) -> Any:
        """Return a part of an f-string as text."""
        if not isinstance(node, ast.FormattedValue):
            return self.value(node)
        value, form = self.value(node.value), self.value(node.format_spec) if node.format_spec else ""
        if not is_constant([value, form]):
            return unknown(value, form)
        try:
            return format(_CONVERSIONS[node.conversion](value), form)
        except (TypeError, ValueError):
            return unknown(value)

    def _read(self, value: Any) -> Any:
        self._touched |= touched(value) if not isinstance(value, dict) else set()
        return value

    def _named(self, name: str) -> Any:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), Thing("import", name))

    def _comprehension(self, element: ast.expr, target: ast.expr, several: Any) -> Any:
        self._scopes.append({})
        known = isinstance(several, list | tuple | range) and len(several) <= _MAX_ROUNDS
        found = []
        for each in several if known else [unknown(several)]:
            self.bind(target, each)
            found.append(self.value(element))
        self._scopes.pop()
        return found if known else unknown(several, *found)

    def _dictionary(self, keys: list[ast.expr | None], values: list[ast.expr]) -> Any:
        found: dict[Any, Any] = {}
        for key, node in zip(keys, values, strict=True):
            value = self.value(node)
            name = None if key is None else self.value(key)
            if key is None and isinstance(value, dict):
                found |= value
            elif key is None or not isinstance(name, str | int | float | bool | None):
                return unknown(found, value)
            else:
                found[name] = value
        return found

    def _attribute(self, owner: Any, name: str) -> Any:
        match owner:
            case Thing(role="import"):
                return Thing("import", f"{owner.name}.{name}")
            case Thing(role="options" | "instance" | "class" | "config" | "trainer") if name in owner.parts:
                return self._read(owner.parts[name])
            case Thing(role="config" | "options"):
                return unknown(name=f"{owner.name}.{name}")
            case Thing(role="model"):
                return Thing("model", f"{owner.name}.{name}")
            case Thing(role="tokenizer") if name in ("tokenizer", "image_processor"):
                return owner
        return unknown(owner, name=name)

    def _entry(self, owner: Any, key: Any) -> Any:
        match owner:
            case Thing(role="splits") if isinstance(key, str):
                call = ast.copy_location(ast.Call(func=ast.Name(id="get"), args=[], keywords=[]), self._here)
                return self._methods["splits"](self, owner, Call("get", call, [key]))
            case Thing(name="os.environ"):
                return unknown(name=f"the environment variable {key}")
            case Thing(role="model"):
                return Thing("model", f"{owner.name}[...]")
            case Data() if isinstance(key, str):
                return Thing("", "a column of the data", touches=frozenset({"data"}))
        try:
            return owner[key]
        except (TypeError, KeyError, IndexError):
            return unknown(owner, key)

    # Calls

    def dotted(self, node: ast.expr) -> str:
        """Return the name of a function or an attribute, with the modules that it was imported from."""
        match node:
            case ast.Name(id=name):
                value = self._named(name)
                return value.name if role_of(value) == "import" else name
            case ast.Attribute(value=owner, attr=name):
                return f"{self.dotted(owner)}.{name}".lstrip(".")
            case _:
                return ""

    def call(self, node: ast.Call) -> Any:
        """Return the result of a call, and account for its effect."""
        outer, self._touched = self._touched, set()
        self._made_in[id(node)] = self._here
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        call = Call(self.dotted(node.func).rpartition(".")[2] or getattr(node.func, "attr", ""), node)
        for argument in node.args:
            starred = isinstance(argument, ast.Starred)
            value = self.value(argument.value if isinstance(argument, ast.Starred) else argument)
            call.extra |= starred and not isinstance(value, list | tuple)
            call.positional += list(value) if starred and not call.extra else [value]
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                call.given[keyword.arg] = value
            elif isinstance(value, dict):
                call.given |= value
            else:
                call.extra = True
        found = self._result(node, owner, call)
        # A known call has reported its effect, and a call that only computes has none.
        self._touched = outer
        return found

    def _result(self, node: ast.Call, owner: Any, call: Call) -> Any:
        if role_of(owner) in self._methods:
            return self._methods[role_of(owner)](self, owner, call)
        target: Any = self._named(node.func.id) if isinstance(node.func, ast.Name) else None
        if isinstance(node.func, ast.Call):
            target = self.value(node.func)
        if role_of(target) == "partial":
            bound: Call = target.parts["call"]
            given, positional = {**bound.given, **call.given}, [*bound.positional, *call.positional]
            call = replace(call, name=target.last_name, positional=positional, given=given)
            target = target.parts["function"]
        if role_of(target) == "function":
            return self._local(target, call)
        if role_of(owner) == "instance" and (method := _method_of(owner, call.name)):
            return self._local(method, replace(call, positional=[owner, *call.positional]))
        if role_of(target) == "class":
            base = target.last_name
            if base in self._calls and base.endswith(("Trainer", "Config")):
                what = "trainer" if base.endswith("Trainer") else "class of arguments"
                for line in (target.node.lineno, self._here.lineno):
                    self.say(Fate.REFUSED, f"a {what} of your own (class {target.node.name})", line=line)
                self._mark(target.node, Fate.REFUSED, f"a {what} of your own")
                return self._calls[base](self, replace(call, name=base))
            made = Thing("instance", target.node.name, parts={**target.parts, **call.given}, node=target.node)
            if start := _method_of(made, "__init__"):
                self._local(start, replace(call, positional=[made, *call.positional]))
            return made
        if call.name in self._calls:
            return self._calls[call.name](self, call)
        if call.name == "requires_grad_":
            self._freeze(call.positional[0] if call.positional else True)
            return owner
        name = self.dotted(node.func)
        if name in _FOLDED and not call.given and is_constant(call.positional):
            try:
                return _FOLDED[name](*call.positional)
            except (TypeError, ValueError):
                return unknown(owner, *call.values)
        if name == "dict" and not call.positional:
            return dict(call.given)
        if isinstance(owner, str) and call.name in _TEXT_METHODS and is_constant(call.values):
            return getattr(owner, call.name)(*call.positional, **call.given)
        if isinstance(owner, dict | list):
            return self._of_container(owner, call)
        if (isinstance(owner, Thing) and owner.name == "os.environ") or name == "os.getenv":
            return self._environment(call)
        if _HARMLESS.intersection(name.split(".")):
            self.say(Fate.UNRELATED, "it reports, or prepares the script")
        elif call.name not in _PURE and (acted := touched(owner, *call.values) & _MUTABLE):
            self.say(Fate.CHECK, f"calls {name or call.name} with the {_listed(acted)}, and is not read")
        elif isinstance(self._here, ast.Expr) and call.name not in _PURE:
            self.say(Fate.CHECK, f"calls {name or call.name}, which is not read")
        return unknown(owner, *call.values, name=name)

    def _of_container(self, owner: Any, call: Call) -> Any:
        """Call a method of a list or a dictionary."""
        first = call.first
        if isinstance(owner, list) and call.name in ("append", "extend") and len(call.positional) == 1:
            owner += list(first) if call.name == "extend" and isinstance(first, list | tuple) else [first]
        elif isinstance(owner, dict) and call.name == "update":
            owner.update({**(first if isinstance(first, dict) else {}), **call.given})
        elif isinstance(owner, dict) and call.name == "get" and call.positional:
            default = call.positional[1] if len(call.positional) > 1 else None
            return owner.get(first, default) if is_constant(first) else unknown(owner)
        else:
            return unknown(owner, call.positional)
        self.say(Fate.UNRELATED, "it is read where the value is used")
        return None

    def _environment(self, call: Call) -> Any:
        """Call a method of `os.environ`, or `os.getenv`."""
        name, *rest = call.positional or [None]
        if call.name in ("get", "getenv") and rest and is_constant(rest[0]):
            self.say(Fate.CHECK, f"the environment variable {name}; its default {rest[0]!r} is taken")
            return rest[0]
        if call.name in ("setdefault", "update"):
            pairs = name if isinstance(name, dict) else {**({name: rest[0]} if rest else {}), **call.given}
            for key, value in pairs.items():
                self._set_variable(key, value)
        return unknown(name=f"the environment variable {name}")

    def _local(self, function: Thing, call: Call) -> Any:
        if len(self._scopes) > _MAX_DEPTH:
            return unknown(*call.values)
        arguments = function.node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        given = {**dict(zip(names, call.positional, strict=False)), **call.given}
        if arguments.vararg is not None:
            given[arguments.vararg.arg] = call.positional[len(names) :]
        if arguments.kwarg is not None and not call.extra:
            known = {*names, *(each.arg for each in arguments.kwonlyargs)}
            given[arguments.kwarg.arg] = {name: value for name, value in call.given.items() if name not in known}
        return self._inlined(function, given)

    def _inlined(self, function: Thing, given: dict[str, Any]) -> Any:
        """Read the body of a function of the script in the place of its call."""
        node, arguments = function.node, function.node.args
        self._called.add(id(node))
        names = [*arguments.posonlyargs, *arguments.args]
        defaults = [*zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True)]
        defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        scope = {each.arg: unknown(name=each.arg) for each in (*names, *arguments.kwonlyargs)}
        scope |= {each.arg: self.value(default) for each, default in defaults if default is not None}
        self._scopes.append(scope | given)
        before = len(self._returned)
        if isinstance(node, ast.Lambda):
            self._returned.append(self.value(node.body))
        else:
            self.run(node.body)
            self.say(Fate.UNRELATED, f"the lines of {function.name} are read in its place")
        returned = self._returned[before:]
        del self._returned[before:]
        self._scopes.pop()
        # A branch that is read as taken returns first. None means that the case is left out.
        return next((value for value in returned if value is not None), None)


def _listed(roles: Iterable[str]) -> str:
    return " and the ".join(sorted(roles))


def _method_of(owner: Thing, name: str) -> Thing | None:
    """Return a method of an object of a class of the script."""
    body = owner.node.body if owner.node is not None else []
    found = next((each for each in body if isinstance(each, ast.FunctionDef) and each.name == name), None)
    return None if found is None else Thing("function", name, node=found)
