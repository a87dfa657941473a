"""Every notebook of the documentation runs from its first cell to its last."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from safetensors.numpy import load_file

from rl_core.testing.exhaustive import exhaustive

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Settings and connections of Jupyter in the folder of the test."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def run(notebook, folder):
    NotebookClient(notebook, timeout=840, resources={"metadata": {"path": str(folder)}}).execute()


def printed(cell):
    """The text that a cell has printed and displayed."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(texts)


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["first_run.ipynb", "own_loop.ipynb"]


@every_notebook
def test_it_is_kept_without_what_a_run_of_it_leaves(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


def test_a_reward_in_a_cell_is_refused_with_the_remedy(tmp_path):
    cell = """
def score(response):
    return 1.0

import rl_launch

rl_launch.train("grpo-arithmetic", {"data.train.env_name": score})
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    with pytest.raises(CellExecutionError) as caught:
        run(notebook, tmp_path)
    assert caught.value.ename == "ConfigError"
    assert caught.value.evalue.startswith("data.train.env_name: score is defined in a notebook")
    assert "%%writefile mine.py" in caught.value.evalue


# `driver` trains by the same call
@exhaustive
def test_the_first_run_trains_and_shows_its_rollouts(tmp_path):
    notebook = read(ROOT / "docs/notebooks/first_run.ipynb")
    run(notebook, tmp_path)
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    assert "finished=True" in printed(cells["train"])
    assert [line.split()[0] for line in printed(cells["metrics"]).splitlines()] == ["1", "2", "3", "4", "5"]
    shown = printed(cells["rollouts"]).splitlines()
    assert len(shown) == 4
    assert all("'accuracy'" in line and "'short'" in line for line in shown)
    # the rows and the rewards are kept with the run
    assert [path.suffix for path in (tmp_path / "runs/notebook/data").iterdir()] == [".arrow"]
    assert [path.name.partition("-")[0] for path in (tmp_path / "runs/notebook/code").iterdir()] == ["rewards"]


OWN_LOOPS = {"grpo": "grpo-arithmetic", "dpo": "dpo-tiny", "distillation": "distill-tiny"}
"""Recipe of each loop by its config section."""


@pytest.fixture
def own_loops(tmp_path):
    """Folder in which the notebook of loops has run, and its cells."""
    notebook = read(ROOT / "docs/notebooks/own_loop.ipynb")
    run(notebook, tmp_path)
    return tmp_path, {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def test_loops_of_a_notebook_make_their_steps(own_loops):
    folder, cells = own_loops
    for name in OWN_LOOPS:
        lines = printed(cells[name]).splitlines()
        assert [line.split()[0] for line in lines if re.fullmatch(r"\d [-.\d]+", line)] == ["1", "2"]
        assert (folder / f"runs/own_{name}/checkpoints/step_2/hf/model.safetensors").is_file()


@exhaustive
def test_loops_of_a_notebook_end_with_the_weights_of_rl_train(own_loops):
    folder, _ = own_loops
    for name, recipe in OWN_LOOPS.items():
        steps = [f"{name}.max_num_steps=2", f"{name}.val_period=0", "checkpointing.metric_name=null"]
        command = [sys.executable, "-m", "rl_launch.cli", "train", recipe, f"run_dir=runs/trained_{name}", *steps]
        subprocess.run(command, check=True, cwd=folder)
        found, expected = (
            load_file(folder / f"runs/{made}_{name}/checkpoints/step_2/hf/model.safetensors")
            for made in ("own", "trained")
        )
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[each], expected[each]) for each in expected)
