"""Operations of a training step in closed form, and peaks by name."""

import numpy as np
import pytest

from rl_core.metrics import reduce_metrics
from rl_core.torch.training.flops import AttentionShape, ModelShape, peak_flops, speed_metrics


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_only_keys_that_a_query_sees_count(window):
    lengths = [5, 1, 8]
    pairs = sum(min(place + 1, window or length) for length in lengths for place in range(length))
    shape = ModelShape(0, 0, (AttentionShape(num_heads=3, key_dim=4, value_dim=6, window=window),))
    assert shape.training_flops(lengths) == 3 * (2 * 3 * 4 + 2 * 3 * 6) * pairs


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_only_keys_in_the_chunk_of_a_query_count(chunk):
    lengths = [5, 1, 8]
    pairs = sum(place % chunk + 1 for length in lengths for place in range(length))
    shape = ModelShape(0, 0, (AttentionShape(num_heads=3, key_dim=4, value_dim=6, chunk=chunk),))
    assert shape.training_flops(lengths) == 3 * (2 * 3 * 4 + 2 * 3 * 6) * pairs


def test_frozen_matrices_have_no_products_by_their_entries():
    assert ModelShape(matrices=10, trained=10, attention=()).training_flops([2, 3]) == 6 * 10 * 5
    assert ModelShape(matrices=10, trained=1, attention=()).training_flops([2, 3]) == (4 * 10 + 2) * 5


def test_sums_of_long_rows_do_not_overflow():
    layer = AttentionShape(num_heads=64, key_dim=128, value_dim=128)
    assert ModelShape(0, 0, (layer,) * 80).training_flops(np.array([2**20] * 64)) > 2**63


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce GTX 1060", None),
    ],
)
def test_peaks_go_by_name(name, peak):
    assert peak_flops(name) == peak


def test_utilisation_is_that_of_all_devices_together():
    parts = [speed_metrics(300.0, 2.0, 1000.0), speed_metrics(100.0, 2.0, 1000.0)]
    assert reduce_metrics(parts) == {"flops": 400.0, "flops_per_second": 200.0, "mfu": 0.1}
    assert reduce_metrics([speed_metrics(300.0, 2.0, None)]) == {"flops": 300.0, "flops_per_second": 150.0}
