import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.model_config import ModelConfig
from rl_core.plugins import BackendPlugin, MeshCase, Requirement
from rl_dtensor.config import DTensorConfig
from rl_dtensor.plugin import PLUGIN as DTENSOR
from rl_launch.commands.preparation import prove_family
from rl_launch.doctor.family import FamilyTable

CHECK = """
from pathlib import Path
from rl_core.errors import ConfigError
from rl_core.selfcheck.cases import FamilyCase

def check(model, only):
    calls = Path(model, "calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    verdict = Path(model, "verdict").read_text()
    if verdict == "unknown":
        raise ConfigError("a tiny strange model cannot be made")
    yield FamilyCase(only.mesh, only.layout, verdict, {"grad_norm": 0.37})
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with the config of a model, and a backend whose check says what its file `verdict` says."""
    (tmp_path / "some_check.py").write_text(CHECK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "strange", "hidden_size": 8, "has_bias": True}))
    (made / "verdict").write_text("exact")
    return made


def backend(mesh="tp2", held=()):
    return BackendPlugin(
        name="some",
        key="some_cfg",
        config=Config,
        worker="",
        requirement=Requirement("some"),
        ranks=lambda config: 1,
        selfcheck="some_check:check",
        mesh_case=lambda section: MeshCase(mesh, 2, {"split": 2}, is_packed=True, has_adapters=False),
        held_families=frozenset(held),
    )


def prove(model, plugin, family_check="auto", *, with_images=False):
    seen = SimpleNamespace(enabled=with_images)
    section = SimpleNamespace(model_name=str(model), family_check=family_check, trust_remote_code=None, vision=seen)
    prove_family(section, "policy", plugin, sys.executable)


def num_checks(model):
    calls = model / "calls"
    return len(calls.read_text()) if calls.exists() else 0


def test_a_family_is_proven_once_for_each_mesh_and_make(model):
    prove(model, backend())
    prove(model, backend())
    assert num_checks(model) == 1
    prove(model, backend(mesh="pp2"))
    assert num_checks(model) == 2
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "hidden_size": 64}))
    prove(model, backend())
    assert num_checks(model) == 2
    (model / "config.json").write_text(json.dumps({**fields, "has_bias": False}))
    prove(model, backend())
    assert num_checks(model) == 3


def test_a_family_that_is_off_is_refused_each_time_with_what_differs(model):
    (model / "verdict").write_text("off")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"family strange does not train correctly .* grad norm 3\.7e-01.*=off"):
            prove(model, backend())
    assert num_checks(model) == 1


def test_a_family_that_cannot_be_checked_is_refused_and_not_remembered(model):
    (model / "verdict").write_text("unknown")
    with pytest.raises(ConfigError, match=r"cannot be made\. Set policy.family_check=off"):
        prove(model, backend())
    (model / "verdict").write_text("exact")
    prove(model, backend())


def test_families_of_the_suites_and_those_told_to_go_unproven_are_not_checked(model, caplog):
    prove(model, backend(held=["strange"]))
    assert not caplog.records
    prove(model, backend(), family_check="off")
    assert "strange has not been checked on tp2" in caplog.text
    prove(model, replace(backend(), selfcheck=""))
    assert num_checks(model) == 0


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A package with a table, in which the family of `model` is exact on tp2 and off with adapters."""

    def write(version="1.0", **kind):
        package = tmp_path / "some_tables"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        case = {"num_ranks": 2, "settings": {"split": 2}, "is_packed": True, "has_adapters": False, "reason": ""}
        cases = [case | {"verdict": "exact"}, case | {"verdict": "off", "has_adapters": True, "reason": "it differs"}]
        held = {"kind": {"layer_types": [], "has_bias": True, "is_new": False, **kind}, "cases": cases}
        content = {"versions": {"some-engine": "1.0"}, "families": {"strange": held}}
        content["images"] = {"seeing": held | {"cases": [case | {"verdict": "exact"}]}}
        (package / "families.json").write_text(json.dumps(content))
        installed = {"some-engine": version}
        monkeypatch.setattr("rl_launch.commands.preparation._versions", lambda python: installed)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "some_tables", raising=False)
        return replace(backend(), config=Settings, family_table="some_tables:families.json")

    return write


class Settings(Config):
    split: int = 1
    is_quick: bool = False


def test_a_family_in_the_backends_table_is_not_checked_again(model, table):
    prove(model, table())
    prove(model, table(version="1.0+cpu"))
    assert num_checks(model) == 0


def test_models_that_train_with_images_have_rows_of_their_own(model, table):
    language = {**json.loads((model / "config.json").read_text()), "model_type": "without a row"}
    for kind, checks in (("seeing", 0), ("another", 1)):
        (model / "config.json").write_text(json.dumps({"model_type": kind, "text_config": language}))
        prove(model, table(), with_images=True)
        assert num_checks(model) == checks


def test_a_case_that_is_off_in_the_table_is_refused_at_once(model, table):
    case = MeshCase("tp2", 2, {"split": 2, "is_quick": False}, is_packed=True, has_adapters=True)
    plugin = replace(table(), mesh_case=lambda section: case)
    with pytest.raises(ConfigError, match=r"does not train correctly .* it differs"):
        prove(model, plugin)
    assert num_checks(model) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"version": "1.1"},
        {"has_bias": False},
        {"layer_types": ["full"]},
        {"mesh": {"split": 4}},
        {"mesh": {"split": 2, "is_quick": True}},
    ],
    ids=str,
)
def test_another_version_kind_or_mesh_than_in_the_table_is_checked(model, table, other):
    mesh = other.pop("mesh", {"split": 2})
    if "layer_types" in other:
        fields = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**fields, **other, "is_strange": True}))
        other = {}
    case = MeshCase("tp2", 2, mesh, is_packed=True, has_adapters=False)
    prove(model, replace(table(**other), mesh_case=lambda section: case))
    assert num_checks(model) == 1


OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.48.0",
    "use_cache": True,
}
"""Fields of a `config.json` on the hub."""


def test_a_family_in_the_table_of_the_dtensor_backend_is_not_checked_again():
    table = FamilyTable.of(DTENSOR)
    policy = ModelConfig(model_name="some/olmo", sequence_packing={"enabled": True})
    section = SimpleNamespace(**dict(policy), dtensor_cfg=DTensorConfig(tensor_parallel_size=4))
    found = table.find(OLMO_2, DTENSOR.mesh_case(section), DTensorConfig, table.versions)
    assert (found.mesh, found.layout, found.verdict) == ("tp2", "packed, full", "exact")
    biased = {**OLMO_2, "attention_bias": True}
    assert table.find(biased, DTENSOR.mesh_case(section), DTensorConfig, table.versions) is None


def test_a_model_with_code_of_its_own_is_not_checked(tmp_path, caplog):
    plugin = backend()
    section = SimpleNamespace(model_name=str(tmp_path), family_check="auto", trust_remote_code="sha256:0")
    (tmp_path / "config.json").write_text('{"model_type": "novel"}')
    prove_family(section, "policy", plugin, "python")
    assert "has code of its own, which has not been checked on" in caplog.text
