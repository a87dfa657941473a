"""A recipe from the config of another system: `rl config import`."""

from __future__ import annotations

from pathlib import Path

from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.foreign.report import recipe_text, refusal_text, report_text, summary_text


def import_recipe(
    path: Path,
    system: str,
    output: Path | None = None,
    *,
    keep_going: bool = False,
    algorithm: str = "",
    gpus: int | None = None,
) -> tuple[str, str]:
    """Import a config, and write the recipe and its report if there is a file to write them to.

    Args:
        path: The config of the other system.
        system: Its name, as `--from` takes it.
        output: File of the recipe, with the report next to it; None writes nothing.
        keep_going: True to leave out features that are not offered instead of refusing the config.
        algorithm: Name of the algorithm, if the file does not contain it.
        gpus: Number of GPUs, if the file does not contain it.

    Returns:
        The recipe, empty if it was written, and a summary with everything that the user has to check.

    Raises:
        ConfigError: If the config cannot be read, or requests features that are not offered.
    """
    if output is not None and output.expanduser().exists():
        raise ConfigError(f"--output: {output} exists; give another file, or remove it")
    imported = import_config(path.expanduser(), system, algorithm=algorithm, gpus=gpus)
    if imported.features and not keep_going:
        raise ConfigError(refusal_text(imported))
    summary = summary_text(imported)
    if output is None:
        return recipe_text(imported), f"{summary}Pass --output FILE to write the recipe, and the result for each key.\n"
    recipe = output.expanduser()
    report = recipe.with_name(f"{recipe.name}.report.txt")
    try:
        recipe.write_text(recipe_text(imported, report.name), encoding="utf-8")
        report.write_text(report_text(imported), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}") from None
    return "", f"{summary}Wrote {output}, and the result for each key to {output}.report.txt.\n"
