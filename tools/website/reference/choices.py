"""Pages of the environments and datasets that a config can name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_core.config import Explanation, show
from rl_launch.commands.catalog import Choice, datasets, environments, hub_datasets, shared_settings
from website.reference.text import code, prose, table

ENVIRONMENTS = "reference/environments.md"
DATASETS = "reference/datasets.md"
_ENVIRONMENTS = """# Environments

These environments are installed with the packages. A config sets them up under `env.NAME`, and
[built-in environments](../built-in-environments.md) describes what they score. `rl env list NAME` prints the same in a
terminal.

## Settings of every environment

"""
_DATASETS = """# Datasets

A config chooses a dataset with `data.train.dataset_name` and `data.validation.dataset_name`, and sets it up under
`settings` next to it. [Data formats](../data-formats.md) describes files of your own. `rl data list NAME` prints the
same in a terminal.

"""
_HUB = """## Datasets of the Hugging Face hub

The name of these datasets is enough, because the columns of their rows are known.

"""


def pages() -> dict[str, str]:
    """Return the text of the pages by their places."""
    shared = _ENVIRONMENTS + _settings(shared_settings()) + "\n"
    hub = table(("dataset", "about"), ((code(name), prose("; ".join(about))) for name, about in hub_datasets().items()))
    return {
        ENVIRONMENTS: shared + "\n".join(_choices(environments())),
        DATASETS: _DATASETS + "\n".join(_choices(datasets())) + "\n" + _HUB + hub,
    }


def _choices(found: Mapping[str, Choice]) -> Iterable[str]:
    for name, choice in found.items():
        text = f"## {code(name)} {{ #{name} }}\n\n{prose(choice.doc)}\n\n"
        if choice.missing:
            text += f"It needs a further package: {code(f'pip install {choice.missing!r}')}.\n\n"
        text += _settings(choice.settings) if choice.settings else ""
        if choice.tasks:
            text += f"\n{len(choice.tasks)} tasks; `rl data list {name}` lists them.\n"
        yield text


def _settings(settings: Iterable[Explanation]) -> str:
    rows = (
        (
            code(each.key),
            prose(each.doc),
            prose(each.type),
            "must be set" if each.required else "" if each.type == "section" else code(show(each.default)),
        )
        for each in settings
    )
    return table(("key", "meaning", "allowed", "default"), rows)
