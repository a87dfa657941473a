"""4-bit weights of experts are read slice by slice as what they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_core.torch.files.model_files import WeightFiles

NAME = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, OUTPUTS, GROUPS = 3, 10, 4
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@pytest.fixture
def packed() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"{NAME}_blocks": torch.randint(256, (EXPERTS, OUTPUTS, GROUPS, 16), generator=generator, dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(100, 140, (EXPERTS, OUTPUTS, GROUPS), generator=generator, dtype=torch.uint8),
        f"{NAME}_bias": torch.ones(EXPERTS, OUTPUTS),
    }


@pytest.fixture
def folder(packed: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Values and scales in different files."""
    save_file({f"{NAME}_blocks": packed[f"{NAME}_blocks"]}, tmp_path / "first.safetensors")
    rest = {name: tensor for name, tensor in packed.items() if not name.endswith("_blocks")}
    save_file(rest, tmp_path / "second.safetensors")
    places = {f"{NAME}_blocks": "first.safetensors", **dict.fromkeys(rest, "second.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def expected(packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """In float64, by the specification."""
    blocks, scales = packed[f"{NAME}_blocks"], packed[f"{NAME}_scales"]
    found = torch.empty(EXPERTS, 32 * GROUPS, OUTPUTS, dtype=torch.float64)
    for expert in range(EXPERTS):
        for place in range(32 * GROUPS):
            for output in range(OUTPUTS):
                group, within = divmod(place, 32)
                byte = int(blocks[expert, output, group, within // 2])
                half = byte >> 4 if within % 2 else byte & 15
                found[expert, place, output] = VALUES[half] * 2.0 ** (int(scales[expert, output, group]) - 127)
    return found


def test_every_part_has_the_values_of_the_specification(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    files, whole = WeightFiles.of(folder), expected(packed)
    assert files.names == {NAME, f"{NAME}_bias"}
    slices: list[tuple[slice, ...]] = [
        (),
        (slice(1, 3),),
        (slice(None), slice(0, 64)),
        (slice(0, 1), slice(17, 99), slice(4, 9)),
        (slice(None), slice(40, 41), slice(None)),
        (slice(2, 2),),
    ]
    with files.open() as opened:
        assert opened.shape(NAME) == (EXPERTS, 32 * GROUPS, OUTPUTS)
        for part in slices:
            assert opened.read(NAME, part).double().equal(whole[part])
        assert opened.read(f"{NAME}_bias", ()).equal(torch.ones(EXPERTS, OUTPUTS))


def test_it_is_the_dequantisation_of_transformers(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = mxfp4.convert_moe_packed_tensors(packed[f"{NAME}_blocks"], packed[f"{NAME}_scales"])
    with WeightFiles.of(folder).open() as opened:
        assert opened.read(NAME, ()).equal(theirs)


def test_groups_of_another_size_are_refused(packed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    packed[f"{NAME}_blocks"] = packed[f"{NAME}_blocks"].repeat_interleave(2, 3)
    save_file(packed, tmp_path / "model.safetensors")
    with WeightFiles.of(tmp_path).open() as opened, pytest.raises(ValueError, match="not groups of 32 values"):
        opened.read(NAME, ())
