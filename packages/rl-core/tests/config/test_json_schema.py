"""What editors check recipes by."""

from typing import Any, Literal

from pydantic import Field

from rl_core.config import Config, JsonSchema, NamedConfig
from rl_core.config.json_schema import required

INTERPOLATED = {"$ref": "#/$defs/interpolation"}


class Inner(Config):
    """Settings of the inside."""

    size: int = Field(default=4, gt=0, le=9)
    """How large."""
    name: str
    """How it is called."""


class Chosen(NamedConfig):
    name: Literal["plain"] = "plain"


class Places(Config):
    named = Inner


class Node(Config):
    below: "list[Node]" = []


class Outer(Config):
    inner: Inner
    several: Inner | list[Inner] | None = None
    chosen: Chosen = Chosen()
    node: Node = Node()
    free: dict[str, Any] = {}
    sizes: dict[str, float] = {}
    pair: tuple[int, bool] = (1, True)


def test_a_scalar_has_its_bounds_default_and_documentation() -> None:
    schema = JsonSchema()
    inner = schema.definition(Inner)
    assert inner["description"] == "Settings of the inside."
    assert inner["additionalProperties"] is False
    assert inner["properties"]["size"] == {
        "anyOf": [{"type": "integer", "exclusiveMinimum": 0, "maximum": 9}, INTERPOLATED],
        "description": "How large.",
        "default": 4,
    }
    assert inner["properties"]["name"]["anyOf"][0] == {"type": ["string", "number", "boolean"]}


def test_sections_are_defined_once_and_may_hold_themselves() -> None:
    schema = JsonSchema()
    outer = schema.definition(Outer)["properties"]
    reference = {"$ref": "#/$defs/Inner"}
    assert outer["inner"] == {"anyOf": [reference, INTERPOLATED]}
    assert outer["several"]["anyOf"][:3] == [
        reference,
        {"type": "array", "items": {"anyOf": [reference, INTERPOLATED]}},
        {"type": "null"},
    ]
    assert schema.definition(Node)["properties"]["below"]["anyOf"][0]["items"]["anyOf"][0] == {"$ref": "#/$defs/Node"}
    assert set(schema.definitions) == {"interpolation", "Outer", "Inner", "Chosen", "Node"}


def test_types_of_one_name_have_definitions_of_their_own() -> None:
    class Inner(Config):
        other: bool = False

    schema = JsonSchema()
    assert schema.section(Outer.model_fields["inner"].annotation) != schema.section(Inner)  # type: ignore[arg-type]
    assert set(schema.definitions["Inner2"]["properties"]) == {"other"}


def test_what_a_named_function_takes_is_left_open() -> None:
    schema = JsonSchema()
    chosen = schema.definition(Outer)["properties"]["chosen"]
    assert {"type": "string"} in chosen["anyOf"][0]["anyOf"]
    assert schema.definition(Chosen)["additionalProperties"] is True
    assert schema.definition(Chosen)["properties"]["name"]["anyOf"][0] == {"type": "string"}


def test_mappings_and_tuples() -> None:
    outer = JsonSchema().definition(Outer)["properties"]
    assert outer["free"]["anyOf"][0] == {"type": "object", "additionalProperties": {}}
    assert outer["sizes"]["anyOf"][0]["additionalProperties"]["anyOf"][0] == {"type": "number"}
    pair = outer["pair"]["anyOf"][0]
    assert [each["anyOf"][0]["type"] for each in pair["prefixItems"]] == ["integer", "boolean"]
    assert pair["items"] is False


def test_required_keys_are_those_of_sections_that_are_always_there() -> None:
    assert required(Outer) == {"required": ["inner"], "properties": {"inner": {"required": ["name"]}}}


def test_sections_may_have_names_of_the_user() -> None:
    schema = JsonSchema()
    assert schema.definition(Places)["additionalProperties"] == schema.section(Inner)
