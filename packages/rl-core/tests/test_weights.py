from __future__ import annotations

import itertools
import math
import pickle

from hypothesis import given
from hypothesis import strategies as st

from rl_core.weights import ITEM_BYTES, Manifest, TensorSpec, buckets, num_bytes

specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.uuids().map(str),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
    ),
    max_size=20,
)
MANIFEST = Manifest(4, tuple(TensorSpec(name, (2,), "float32") for name in ("a", "b", "c")), {"d": "a"})


@given(specs, st.integers(1, 200))
def test_buckets_hold_all_tensors_in_order_within_the_limit(tensors: list[TensorSpec], limit: int) -> None:
    made = list(buckets(tensors, limit))
    assert [spec for bucket in made for spec in bucket] == tensors
    for bucket in made:
        assert len(bucket) == 1 or sum(num_bytes(spec) for spec in bucket) <= limit


@given(specs, st.integers(1, 200))
def test_no_bucket_could_have_taken_the_next_tensor(tensors: list[TensorSpec], limit: int) -> None:
    made = list(buckets(tensors, limit))
    for bucket, following in itertools.pairwise(made):
        assert sum(num_bytes(spec) for spec in bucket) + num_bytes(following[0]) > limit


@given(specs)
def test_bytes_are_elements_times_their_size(tensors: list[TensorSpec]) -> None:
    for spec in tensors:
        assert num_bytes(spec) == math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def test_a_manifest_crosses_processes() -> None:
    assert pickle.loads(pickle.dumps(MANIFEST)) == MANIFEST


def test_a_manifest_tells_its_form_by_its_factors() -> None:
    weights, factors = MANIFEST.tensors, (TensorSpec("a.lora_A.weight", (3, 5), "bfloat16"),)
    both = Manifest(4, (*weights, *factors), MANIFEST.tied, num_factors=1)
    alone = Manifest(4, factors, num_factors=1)
    assert [each.form for each in (MANIFEST, both, alone)] == ["merged", "factored", "adapter"]
    assert (MANIFEST.factors, both.factors, alone.factors) == ((), factors, factors)
    assert both.without_factors() == MANIFEST
    assert [each.num_bytes for each in (MANIFEST, both, alone)] == [24, 54, 30]
