"""Recipes as files: their text, a copy to start from, their JSON Schema, and files of earlier versions."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_algos.data.config import DatasetConfig
from rl_core.config import Config, JsonSchema, did_you_mean, load, tree_to_yaml
from rl_core.config.json_schema import DIALECT, required
from rl_core.config.tree import format_path, natural, parse_path, read_file
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.model_config import ModelConfig
from rl_core.plugins import ALGORITHMS, DATASETS, plugin, plugins
from rl_core.user_code import is_in_file
from rl_launch.commands.catalog import Recipe, recipes, tasks_of
from rl_launch.commands.explain import names_config
from rl_launch.recipes import RECIPES, recipe_names
from rl_launch.run_config.reading import read_raw
from rl_launch.run_config.root_types import model_type, root_type, type_of

EDITOR_HINT = "# yaml-language-server: $schema="
"""Begins the line of a YAML file that refers editors to its schema."""

_INHERITS = {
    "description": "A recipe or file, or a list of them, whose keys this file inherits and can override.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}

_IN_FILE = {"type": "string", "pattern": r"\.py:[A-Za-z_]"}
"""An algorithm in a file of the user, which is the only one that knows its sections."""


def recipe_text(name: str) -> str:
    """Return the YAML of a recipe, as its file has it.

    Raises:
        ConfigError: If there is no such recipe; contains the nearest name.
    """
    if name not in recipe_names():
        raise ConfigError(
            f"there is no recipe {name!r}{did_you_mean(name, recipe_names())}; use rl recipes to list all "
            "recipes, and rl recipes WORD to search for a word"
        )
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def recipes_with(words: Sequence[str]) -> list[Recipe]:
    """Return the recipes that have all words in name, algorithm or summary, regardless of case.

    Raises:
        ConfigError: If there are none.
    """
    texts = [(recipe, f"{recipe.name} {recipe.algorithm} {recipe.summary}".lower()) for recipe in recipes()]
    found = [recipe for recipe, text in texts if all(word.lower() in text for word in words)]
    if not found:
        text = " ".join(words)
        near = did_you_mean(text, recipe_names())
        raise ConfigError(f"no recipe mentions {text!r}{near}; use rl recipes to list all of them")
    return found


def write_recipe(name: str, output: Path) -> None:
    """Write a copy of a recipe for a user to change.

    Raises:
        ConfigError: If there is no such recipe, or the file cannot be written, exists, or would inherit from itself.
    """
    text = recipe_text(name)
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {output}: a recipe's file ends in .yaml, such as {output.name}.yaml")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} already exists. Choose another file: rl init {name} --output FILE.yaml") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    try:
        read_raw(output)
    except ConfigError as error:
        # an inherited recipe is looked for next to the file first
        output.unlink()
        raise ConfigError(f"{output} cannot be a copy of {name}: {error}. Choose another file with --output") from None


def recipe_schema(of: str | None = None) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of a recipe's YAML, made from the types of all installed packages.

    A file that inherits by `defaults` need not set the required keys.

    Args:
        of: An algorithm's name, or a recipe or file for the schema of its algorithm; all algorithms if not given.

    Raises:
        ConfigError: If there is no such algorithm or recipe.
    """
    schema = JsonSchema()
    algorithms = _algorithms(of)
    roots = {name: root_type(plugin(ALGORITHMS, name), load({"algorithm": name})) for name in algorithms}
    for name, root in roots.items():
        definition = schema.definition(root)
        definition["properties"]["algorithm"] = {"enum": algorithms, "description": "The algorithm to train with."}
        definition["properties"]["defaults"] = _INHERITS
        # Models of any name, such as `teachers.math`, and sections of which some are models, such as `judges.critic`.
        for key in plugin(ALGORITHMS, name).optional_models:
            head, is_named, _ = key.partition(".*")
            around = root.model_fields[head].annotation if head in root.model_fields else None
            if is_named:
                kinds = around.named if isinstance(around, type) and issubclass(around, Config) else ModelConfig
                several = kinds if isinstance(kinds, tuple) else (kinds or ModelConfig,)
                types = tuple(model_type(kind) if issubclass(kind, ModelConfig) else kind for kind in several)
                models = {"type": "object", "additionalProperties": schema.any_of(types)}
                definition["properties"][head] = models
    for root in roots.values():
        if "env" in root.model_fields:
            # environments of any name that state their `type`, with any settings, which the class checks, or `rewards`
            section: Any = root.model_fields["env"].annotation
            own: dict[str, Any] = {"type": "object", "properties": {"type": {"type": "string"}}}
            own["anyOf"] = [{"required": ["type"]}, schema.section(EnvironmentConfig) | {"required": ["rewards"]}]
            schema.definition(section)["additionalProperties"] = own
    _add_dataset_settings(schema)
    says = {name: {"properties": {"algorithm": {"const": name}}, "required": ["algorithm"]} for name in roots}
    sections = {name: schema.section(root) for name, root in roots.items()}
    # a file without an algorithm inherits it
    inherited = {"if": {"required": ["algorithm"]}, "else": {"anyOf": list(sections.values())}}
    # an environment or a model that must be set only must be if a recipe has it
    least = {name: root_type(plugin(ALGORITHMS, name), load({"algorithm": name}), of_run=True) for name in algorithms}
    complete = [{"if": says[name], "then": required(root)} for name, root in least.items()]
    return {
        "$schema": DIALECT,
        "title": f"Recipe ({', '.join(algorithms)})",
        "type": "object",
        "properties": {"algorithm": {"anyOf": [{"enum": algorithms}, _IN_FILE]}},
        "allOf": [*({"if": says[name], "then": section} for name, section in sections.items()), inherited],
        "if": {"not": {"required": ["defaults"]}},
        "then": {"required": ["algorithm"], "allOf": complete},
        "$defs": schema.definitions,
    }


def schema_text(schema: dict[str, Any]) -> str:
    """Return a schema as the text of a file."""
    return json.dumps(schema, indent=1) + "\n"


def write_schema(schema: dict[str, Any], path: Path) -> str:
    """Write a schema to a file; returns the line for YAML files in the same folder that refers editors to it.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        path.write_text(schema_text(schema))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file.") from None
    return f"{EDITOR_HINT}{path.name}"


def upgraded_text(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file under the keys of this version, and the keys that it replaces.

    Only sections with such keys are written again, without their comments; all else stays as it is.

    Raises:
        ConfigError: If the file cannot be read.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} is not a YAML file")
    raw = load(path, search=[RECIPES])
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text)
    written = natural(read_file(path, str(path)).plain())
    own = load({key: value for key, value in written.items() if key != "defaults"})
    upgraded, upgrade = own.upgraded(type_of(raw), is_whole=False)
    sections = sorted({parse_path(key)[:-1] for key in upgrade.renamed}, key=len)
    outermost = [each for each in sections if not any(each[: len(one)] == one for one in sections if one != each)]
    nodes = [(_node(root, section), upgraded.select(format_path(section))) for section in outermost]
    for node, value in sorted(nodes, key=lambda each: each[0].start_mark.index, reverse=True):
        if node.flow_style:
            new = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
        else:
            new = textwrap.indent(tree_to_yaml(value), " " * node.start_mark.column)
        text = text[: node.start_mark.index] + new.strip() + text[_end(node) :]
    return text, tuple(upgrade.renamed)


def _node(node: Any, path: tuple[str | int, ...]) -> Any:
    for segment in path:
        if isinstance(segment, int):
            node = node.value[segment]
        else:
            node = next(value for key, value in node.value if key.value == segment)
    return node


def _end(node: Any) -> int:
    """Return the end of the text of a node; the end that YAML gives a block includes the comments after
    it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)


def _algorithms(of: str | None) -> list[str]:
    if of is None:
        return list(plugins(ALGORITHMS))
    if names_config(of):
        of = str(read_raw(of).select("algorithm"))
    if is_in_file(of):
        raise ConfigError(
            f"{of} is an algorithm in a file, but a schema needs installed algorithms. Omit it for the schema of all "
            "of them, or turn it into a package with an rl.algorithms entry point"
        )
    return [plugin(ALGORITHMS, of).name]


def _add_dataset_settings(schema: JsonSchema) -> None:
    """Give a dataset's `settings` the type of the plugin that its `dataset_name` chooses."""
    rules = []
    for name, found in plugins(DATASETS).items():
        if found.settings is None:
            continue
        settings: type[Config] = found.settings
        definition = schema.definition(settings)
        if tasks := tasks_of(name):
            definition["properties"]["task"] = {"anyOf": [{"enum": list(tasks)}, schema.interpolation]}
        names_it = {"properties": {"dataset_name": {"const": name}}, "required": ["dataset_name"]}
        either = {"anyOf": [schema.section(settings), schema.interpolation]}
        rules.append({"if": names_it, "then": {"properties": {"settings": either}}})
    schema.definition(DatasetConfig)["allOf"] = rules
