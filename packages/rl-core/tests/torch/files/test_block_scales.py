"""8-bit weights are read slice by slice as what they stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_core.torch.files.model_files import WeightFiles

SHAPE = (300, 200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A matrix of 3 by 2 blocks, the last ones cut off, and a vector without scales."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "layer.weight": torch.randn(SHAPE, generator=generator).to(torch.float8_e4m3fn),
        "layer.weight_scale_inv": torch.rand(3, 2, generator=generator),
        "norm.weight": torch.ones(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "tensors.pt")
    return tmp_path


def expected(folder: Path) -> torch.Tensor:
    tensors = torch.load(folder / "tensors.pt")
    values, scales = tensors["layer.weight"].double(), tensors["layer.weight_scale_inv"].double()
    found = torch.empty(SHAPE, dtype=torch.float64)
    for row in range(SHAPE[0]):
        for column in range(SHAPE[1]):
            found[row, column] = values[row, column] * scales[row // 128, column // 128]
    return found


def test_values_are_multiplied_by_the_scale_of_their_block(folder: Path) -> None:
    files, whole = WeightFiles.of(folder), expected(folder)
    assert files.names == {"layer.weight", "norm.weight"}
    slices: list[tuple[slice, ...]] = [
        (),
        (slice(0, 300),),
        (slice(100, 260),),
        (slice(None), slice(130, 190)),
        (slice(128, 129), slice(127, 129)),
        (slice(5, 5), slice(None)),
    ]
    with files.open() as opened:
        for part in slices:
            torch.testing.assert_close(opened.read("layer.weight", part).double(), whole[part], rtol=1e-6, atol=0)
        assert opened.read("norm.weight", ()).equal(torch.ones(5))


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(256, 256).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFiles.of(tmp_path).open() as opened, pytest.raises(ValueError, match=r"a_scale_inv has shape \(4, 4\)"):
        opened.read("a", ())
