"""A dataset and a processor from outside the workspace: of an installed package, and of a file beside the config."""

import json
import os
import subprocess
import sys

PACKAGE = '''
from rl_algos.data.rows.example import Example
from rl_core.config import Config
from rl_core.plugins import DatasetPlugin, Requirement

CAPITALS = {"train": [("France", "Paris"), ("Peru", "Lima"), ("Japan", "Tokyo")], "validation": [("Chad", "N'Djamena")]}


class CountriesSettings(Config):
    """Countries and their capitals."""

    shout: bool = False
    """Names in capital letters."""


def load(settings, split):
    config = CountriesSettings.model_validate(dict(settings))
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS[split]]
    return [{**row, "country": row["country"].upper()} for row in rows] if config.shout else rows


def capital_of(row, settings):
    """A question for the capital."""
    return Example(({"role": "user", "content": f"{row['country']}?"},), row["capital"])


DATASET = DatasetPlugin("countries", "countries:load", Requirement("countries"), CountriesSettings)
'''

PROCESSOR = '''
from rl_algos.data.rows.example import Example
from rl_core.errors import DataError


def country_of(row, settings):
    """A question the other way round."""
    if not row["capital"].isalpha():
        raise DataError(f"the capital {row['capital']!r} is hard to type")
    return Example(({"role": "user", "content": f"{row['capital']} is in?"},), row["country"])
'''

CHILD = """
import json, sys

from rl_core.errors import RLError
from rl_launch.run_config.reading import read_plan

try:
    plan = read_plan(sys.argv[1], sys.argv[2:])
    datasets = plan.algorithm.load(plan.config)
except RLError as error:
    sys.exit(str(error))
examples = [
    [dataset.name, row_id, example.messages[0]["content"], example.answer]
    for dataset in (*datasets.train, *datasets.validation)
    for row_id, example in dataset.examples.items()
]
print(json.dumps(examples))
"""


def installed(folder):
    """A package that offers a dataset, as pip leaves it."""
    (folder / "countries.py").write_text(PACKAGE)
    about = folder / "countries-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: countries\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rl.datasets]\ncountries = countries:DATASET\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def run(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def loaded(environment, *arguments):
    answer = run(environment, sys.executable, "-c", CHILD, *arguments)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_an_installed_dataset_is_listed_and_read_with_its_processor(tmp_path):
    environment = installed(tmp_path)
    listed = run(environment, sys.executable, "-m", "rl_launch.cli", "data", "list", "countries").stdout
    assert "Countries and their capitals." in listed
    assert "shout = false" in listed
    data = "{dataset_name: countries, processor: countries:capital_of, settings: {shout: true}}"
    validation = "{dataset_name: countries, processor: countries:capital_of}"
    keys = (f"data.train={data}", f"data.validation={validation}")
    assert loaded(environment, "sft-arithmetic", *keys) == [
        ["countries", "countries:train:0", "FRANCE?", "Paris"],
        ["countries", "countries:train:1", "PERU?", "Lima"],
        ["countries", "countries:train:2", "JAPAN?", "Tokyo"],
        ["countries", "countries:validation:0", "Chad?", "N'Djamena"],
    ]


def test_a_processor_in_a_file_converts_rows_and_refuses_one(tmp_path):
    environment = installed(tmp_path)
    (tmp_path / "turned.py").write_text(PROCESSOR)
    one = f"{{dataset_name: countries, processor: '{tmp_path}/turned.py:country_of'}}"
    keys = (f"data.train={one}", "data.validation={dataset_name: arithmetic}")
    found = loaded(environment, "sft-arithmetic", *keys)
    assert found[0] == ["countries", "countries:train:0", "Paris is in?", "France"]
    keys = (f"data.train={one}", f"data.validation={one}")
    refused = run(environment, sys.executable, "-c", CHILD, "sft-arithmetic", *keys)
    assert refused.returncode == 1
    assert 'countries (validation), row 0 (from 0): the capital "N\'Djamena" is hard to type' in refused.stderr


def test_a_wrong_setting_of_an_installed_dataset_is_named(tmp_path):
    environment = installed(tmp_path)
    data = "{dataset_name: countries, processor: countries:capital_of, settings: {shuot: true}}"
    refused = run(environment, sys.executable, "-c", CHILD, "sft-arithmetic", f"data.train={data}")
    assert refused.returncode == 1
    assert "settings of the dataset 'countries': shuot: no such setting" in refused.stderr
