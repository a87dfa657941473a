"""The origins of a run's config, kept in its folder."""

from rl_core.config import load
from rl_launch.run_session.directory.recording import read_origins, write_origins


def test_origins_are_files_and_lines_or_defaults(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: sft\nsft: {seed: 1, batch: 2}\ndata: [a, b]\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: sft\nsft:\n  seed: 1\n")

    write_origins(tmp_path, load(recipe))

    found = read_origins(tmp_path)
    assert found["sft.seed"] == f"{recipe}:3"
    assert found["sft.batch"] == "default"
    assert set(found) == {"algorithm", "sft.seed", "sft.batch", "data[0]", "data[1]"}


def test_a_run_that_is_resumed_from_its_folder_keeps_the_first_origins(tmp_path):
    config, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    config.write_text("algorithm: sft\nsft: {seed: 1, batch: 2}\n")
    recipe.write_text("sft:\n  seed: 1\n")
    write_origins(tmp_path, load(recipe))
    before = read_origins(tmp_path)

    write_origins(tmp_path, load(config))

    assert read_origins(tmp_path) == before
