"""Public names are imported from their modules on first use."""

import sys

import pytest

from rl_core import exports
from rl_core.exports import homes_of, lazy_exports, public_alternatives, public_home


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "a_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from rl_core.exports import lazy_exports\n__getattr__, __dir__ = lazy_exports(__name__)\n"
    )
    (folder / "__init__.pyi").write_text(
        "from a_package.shapes import Square as Square\nfrom a_package.shapes import area as area\n__version__: str\n"
    )
    (folder / "shapes.py").write_text("class Square: ...\n\ndef area(square): return 1\n\ndef hidden(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("a_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "a_package"]:
        del sys.modules[name]
    homes_of.cache_clear()
    exports._check_range.cache_clear()


def test_a_name_is_imported_when_it_is_first_used(package):
    assert "a_package.shapes" not in sys.modules
    assert package.area(package.Square()) == 1
    assert package.__all__ == dir(package) == ["Square", "__version__", "area"]


@pytest.mark.parametrize(
    ("wanted", "present", "fits"),
    [
        ("rl-core<0.3,>=0.2.0", "0.2.0", True),
        ("rl-core[ray]<0.3,>=0.2.0", "0.2.10", True),
        ("rl-core<0.3,>=0.2.0", "0.3.0", False),
        ("rl-core<0.3,>=0.2.0", "0.3.0rc1", False),
        ("rl-core<0.3,>=0.2.0", "0.1.9", False),
        ("rl-core<0.12,>=0.9", "0.10.0", True),
        ("rl-core[vision]<0.3,>=0.2.0; extra == 'vision'", "0.1.0", True),
        ("numpy>=2", "0.1.0", True),
    ],
)
def test_a_package_beside_another_version_of_rl_core_is_refused_at_its_first_name(
    package, wanted, present, fits, monkeypatch
):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [wanted])
    monkeypatch.setattr("importlib.metadata.version", lambda name: present if name == "rl-core" else "0.2.0")
    exports._check_range.cache_clear()
    if fits:
        assert package.Square
        return
    with pytest.raises(ImportError, match=rf"a-package 0\.2\.0 needs rl-core.*, but {present} is here: .*install"):
        _ = package.Square


def test_a_star_import_takes_the_public_names():
    names = {}
    exec("from rl_core import *", names)
    assert {"Batch", "__version__"} <= set(names)
    assert "exports" not in names


@pytest.mark.parametrize("name", ["hidden", "missing", "Square.side"])
def test_other_names_are_no_attributes(package, name):
    with pytest.raises(AttributeError, match=f"module 'a_package' has no attribute '{name}'"):
        getattr(package, name)


def test_a_package_without_a_stub_is_refused():
    with pytest.raises(FileNotFoundError, match=r"rl_core\.data has no __init__\.pyi"):
        lazy_exports("rl_core.data")


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("rl_core.data.batch", "Batch", "rl_core"),
        ("rl_core.data.batch", "RowStore", "rl_core.data.batch"),
        ("rl_core.torch.optim.adamw", "HalfStateAdamW", "rl_core.torch"),
        ("collections", "OrderedDict", "collections"),
        ("never_imported.module", "Name", "never_imported.module"),
    ],
)
def test_the_public_home_of_a_name(module, name, home):
    if module.startswith("rl_core"):
        __import__(module)
    assert public_home(module, name) == home


@pytest.mark.parametrize(
    ("module", "name", "alternatives"),
    [
        ("rl_core.reward_parts", "thinking_format", ["rl_core:thinking_format"]),
        ("rl_core.data.batch", "Bach", ["rl_core:Batch"]),
        ("rl_core.reward_parts", "missing", []),
        ("collections.missing", "OrderedDict", []),
    ],
)
def test_the_public_names_to_use_instead(module, name, alternatives):
    assert public_alternatives(module, name) == alternatives
