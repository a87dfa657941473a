"""`rl config schema`: a JSON Schema of recipes, for editors and validators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_core.config import Config, JsonSchema, load
from rl_core.config.json_schema import DIALECT, required
from rl_core.errors import ConfigError
from rl_core.plugins import ALGORITHMS, DATASETS, plugin, plugins
from rl_core.user_code import is_in_file
from rl_launch.commands.catalog import tasks_of
from rl_launch.commands.explain import names_config
from rl_launch.run_config.reading import read_raw
from rl_launch.run_config.root_types import root_type

EDITOR_HINT = "# yaml-language-server: $schema="
"""Begins the line of a YAML file that names its schema for editors."""

_INHERITS = {
    "description": "A recipe or file, or a list of them, whose keys this file inherits and can override.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}

_IN_FILE = {"type": "string", "pattern": r"\.py:[A-Za-z_]"}
"""An algorithm in a file of the user, which is the only one that knows its sections."""


def recipe_schema(of: str | None = None) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of a recipe's YAML, made from the types of all installed packages.

    A file that inherits by `defaults` need not set the required keys.

    Args:
        of: An algorithm's name, or a recipe or file for the schema of its algorithm; all algorithms if not given.

    Raises:
        ConfigError: If there is no such algorithm or recipe.
    """
    schema = JsonSchema()
    algorithms = _algorithms(of)
    roots = {name: root_type(plugin(ALGORITHMS, name), load({"algorithm": name})) for name in algorithms}
    for root in roots.values():
        definition = schema.definition(root)
        definition["properties"]["algorithm"] = {"enum": algorithms, "description": "The algorithm to train with."}
        definition["properties"]["defaults"] = _INHERITS
    for root in roots.values():
        _admit_own_environments(schema, root)
    _add_dataset_settings(schema)
    top: dict[str, Any] = {"$schema": DIALECT, "title": f"Recipe ({', '.join(algorithms)})", "type": "object"}
    top["properties"] = {"algorithm": {"anyOf": [{"enum": algorithms}, _IN_FILE]}}
    top["allOf"] = [_of_algorithm(name, schema.section(root)) for name, root in roots.items()]
    # a file without an algorithm inherits it
    top["allOf"].append(
        {"if": {"required": ["algorithm"]}, "else": {"anyOf": [schema.section(root) for root in roots.values()]}}
    )
    complete = [{"if": _says(name), "then": required(root)} for name, root in roots.items()]
    top["if"] = {"not": {"required": ["defaults"]}}
    top["then"] = {"required": ["algorithm"], "allOf": complete}
    top["$defs"] = schema.definitions
    return top


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as the text of a file."""
    return json.dumps(schema, indent=1) + "\n"


def write_schema(schema: dict[str, Any], path: Path) -> str:
    """Write a schema to a file; returns the line by which YAML files in the same folder name it for editors.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        path.write_text(schema_text(schema))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file.") from None
    return f"{EDITOR_HINT}{path.name}"


def _algorithms(of: str | None) -> list[str]:
    if of is None:
        return list(plugins(ALGORITHMS))
    if names_config(of):
        of = str(read_raw(of).select("algorithm"))
    if is_in_file(of):
        raise ConfigError(
            f"{of} is an algorithm in a file, but a schema needs installed algorithms. Omit it for the schema of all "
            "of "
            "them, or turn it into a package with an rl.algorithms entry point"
        )
    return [plugin(ALGORITHMS, of).name]


def _says(algorithm: str) -> dict[str, Any]:
    return {"properties": {"algorithm": {"const": algorithm}}, "required": ["algorithm"]}


def _of_algorithm(name: str, section: dict[str, Any]) -> dict[str, Any]:
    return {"if": _says(name), "then": section}


def _admit_own_environments(schema: JsonSchema, root: type[Config]) -> None:
    """Have `env` take environments of any name that state their `type`, with any settings, which the class checks."""
    if "env" in root.model_fields:
        section: Any = root.model_fields["env"].annotation
        own = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
        schema.definition(section)["additionalProperties"] = own


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
