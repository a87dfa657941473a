"""Every notebook of the documentation runs from its first cell to its last."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

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
    assert [path.name for path in NOTEBOOKS] == ["first_run.ipynb"]


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
