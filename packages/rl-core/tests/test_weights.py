from __future__ import annotations

import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import WeightSyncError
from rl_core.weights import ITEM_BYTES, Manifest, TensorSpec, buckets, num_bytes, verify_receipt

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
SENT = {"a": "1", "b": "2", "c": "3"}


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


def test_what_arrived_whole_is_accepted() -> None:
    verify_receipt(MANIFEST, SENT, dict(SENT), "replica 0")


@pytest.mark.parametrize(
    ("sent", "received", "says", "names"),
    [
        (SENT, {"a": "1", "c": "3"}, "missing: b", ("b",)),
        (SENT, {**SENT, "z": "9"}, "extra: z", ("z",)),
        ({**SENT, "z": "9"}, {**SENT, "z": "9"}, "extra: z", ("z",)),
        (SENT, {**SENT, "b": "x", "c": "x"}, "corrupt: b, c", ("b", "c")),
        ({"a": "1", "b": "2"}, SENT, "not sent: c", ("c",)),
        ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, "not sent: c", ("c",)),
        (SENT, {}, "missing: a, b, c", ("a", "b", "c")),
    ],
)
def test_what_did_not_is_refused_by_name(
    sent: dict[str, str], received: dict[str, str], says: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(WeightSyncError, match=f"version 4 arrived broken at replica 1: {says}") as caught:
        verify_receipt(MANIFEST, sent, received, "replica 1")
    assert caught.value.tensors == names


def test_a_manifest_crosses_processes() -> None:
    assert pickle.loads(pickle.dumps(MANIFEST)) == MANIFEST
