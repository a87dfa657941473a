"""Tables of model families that a backend has checked before, which ship with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rl_core.config import Config
from rl_core.plugins import BackendPlugin, MeshCase
from rl_core.selfcheck.cases import FamilyCase

NO_KIND = frozenset(
    {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a Hugging Face config that do not change which code a model runs."""

DECIDED = ("exact", "off", "refused")


def kind_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Hugging Face config that choose among a family's kinds of layers; sizes are not among them."""
    made_of: dict[str, Any] = {
        name: value for name, value in fields.items() if isinstance(value, bool | str | None) and name not in NO_KIND
    }
    made_of["layer_types"] = sorted(set(fields.get("layer_types") or ()))
    return made_of


@dataclass(frozen=True)
class FamilyTable:
    """Results of a training backend's self-check for tiny models of families.

    Args:
        versions: Versions of the packages that decide them.
        families: Model type to `kind`, as `kind_of` gives it for the model that was checked, and `cases`, each of them
            the fields of a `MeshCase` with `verdict` and `reason`.
    """

    versions: Mapping[str, str]
    families: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, plugin: BackendPlugin) -> FamilyTable:
        """The table that a backend ships; an empty one if it has none."""
        if not plugin.family_table:
            return cls({}, {})
        package, _, name = plugin.family_table.partition(":")
        held = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
        return cls(held["versions"], held["families"])

    def find(
        self, fields: Mapping[str, Any], case: MeshCase, config: type[Config], installed: Mapping[str, str]
    ) -> FamilyCase | None:
        """The result for a model of the same kind on the same mesh with the same versions; None if there is none.

        Args:
            fields: Fields of the model's Hugging Face config.
            case: Mesh, layout of rows and weights that train.
            config: Config type of the backend, which has the defaults of the settings.
            installed: Version of each package in the trainer's environment.
        """
        family = self.families.get(str(fields.get("model_type")))
        if family is None or not self._are_versions(installed) or not _is_of_kind(fields, family["kind"]):
            return None
        for entry in family["cases"]:
            same_rows = (entry["is_packed"], entry["has_adapters"]) == (case.is_packed, case.has_adapters)
            same_mesh = config(**entry["settings"]) == config(**case.settings)
            if same_rows and same_mesh and entry["num_ranks"] == case.num_ranks and entry["verdict"] in DECIDED:
                return FamilyCase(case.mesh, case.layout, entry["verdict"], reason=entry["reason"])
        return None

    def _are_versions(self, installed: Mapping[str, str]) -> bool:
        return all(_public(installed.get(name, "")) == _public(own) for name, own in self.versions.items())


def _is_of_kind(fields: Mapping[str, Any], kind: Mapping[str, Any]) -> bool:
    """Return whether a config is of a kind. Missing fields have their defaults, in the kind as well."""
    asked = kind_of(fields)
    types = asked.pop("layer_types")
    return (not types or types == kind["layer_types"]) and all(
        name in kind and kind[name] == value for name, value in asked.items()
    )


def _public(version: str) -> str:
    """A version without the part that names a build."""
    return version.partition("+")[0]
