"""Configs as YAML that loads back to an equal config."""

from __future__ import annotations

from typing import Any

import yaml

from rl_core.config.references import as_written
from rl_core.config.scalar import read_scalar
from rl_core.config.schema import Config


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this project's reader, or a YAML 1.1 reader, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.replace("\n", "").isprintable():
        style = '"'
    elif "\n" in text:
        style = "|"
    elif not isinstance(read_scalar(text), str):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(config: Config) -> str:
    """The whole config with its defaults, as `config.yaml` of a run directory holds it.

    Values from environment variables stay interpolations.
    """
    return yaml.dump(as_written(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
