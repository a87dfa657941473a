"""A recipe from the config of another system: `rl config import`."""

from __future__ import annotations

from pathlib import Path

from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.foreign.report import recipe_text, refusal_text, report_text


def import_recipe(
    path: Path,
    system: str,
    output: Path | None = None,
    *,
    keep_going: bool = False,
    algorithm: str = "",
    gpus: int | None = None,
) -> str:
    """Import a config, and write the recipe if there is a file to write it to.

    Args:
        path: The config of the other system.
        system: Its name, as `--from` takes it.
        output: File of the recipe; None returns the recipe.
        keep_going: Whether to leave out what is not offered in place of refusing the config.
        algorithm: Name of the algorithm, if the file does not say it.
        gpus: Number of GPUs, if the file does not say it.

    Returns:
        The recipe with the report as comments, or the report if the recipe was written.

    Raises:
        ConfigError: If the config cannot be read, or asks for what is not offered.
    """
    if output is not None and output.expanduser().exists():
        raise ConfigError(f"--output: {output} exists; give another file, or remove it")
    imported = import_config(path.expanduser(), system, algorithm=algorithm, gpus=gpus)
    if imported.features and not keep_going:
        raise ConfigError(refusal_text(imported))
    if output is None:
        return recipe_text(imported)
    try:
        output.expanduser().write_text(recipe_text(imported), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}") from None
    return f"{report_text(imported)}Wrote {output}.\n"
