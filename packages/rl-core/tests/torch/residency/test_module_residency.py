import pytest
import torch
from torch import nn

from rl_core.devices import CPU, REHEARSAL
from rl_core.torch.residency.module_residency import ModuleResidency


def test_a_rehearsal_really_takes_the_weights_away_and_brings_them_back():
    module = nn.Linear(4, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    residency = ModuleResidency(module, REHEARSAL)
    residency.offload(("parameters",))
    assert module.weight.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="parameters are offloaded"):
        residency.require("parameters")
    residency.onload(("parameters",))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_on_the_cpu_there_is_nothing_to_free():
    module = nn.Linear(4, 3)
    residency = ModuleResidency(module, CPU)
    residency.offload(("parameters",))
    assert module.weight.untyped_storage().nbytes()


def test_weights_that_are_mapped_from_a_file_can_leave_too(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(12, dtype=torch.float32).numpy().tobytes())
    module = nn.Linear(4, 3, bias=False)
    module.weight.data = torch.from_file(str(path), shared=False, size=12).view(3, 4)
    residency = ModuleResidency(module, REHEARSAL)
    residency.offload(("parameters",))
    assert module.weight.untyped_storage().nbytes() == 0
    residency.onload(("parameters",))
    assert torch.equal(module.weight.flatten(), torch.arange(12.0))
