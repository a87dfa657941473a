import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rl_launch.run_session.checkpoints.manifest import read_state, write_state

names = st.text(min_size=1, max_size=5)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | arrays(st.sampled_from([np.int32, np.float32, np.uint8, np.bool_]), array_shapes(min_dims=0, max_side=3))
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, np.ndarray):
        return np.asarray(b).dtype == a.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@given(state=st.dictionaries(names, values, max_size=3))
def test_what_is_read_is_what_was_written(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, "loop", state)
    assert same(state, read_state(folder, "loop"))


def test_a_generator_goes_on_where_it_was(tmp_path):
    random = np.random.default_rng(3)
    random.random(5)
    write_state(tmp_path, "loop", {"random": random.bit_generator.state})
    restored = np.random.default_rng(0)
    restored.bit_generator.state = read_state(tmp_path, "loop")["random"]
    assert np.array_equal(random.random(8), restored.random(8))


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": [1, object()]}}, r"loop.a.b\[1\] is a object"),
        ({"a": np.array([None])}, "loop.a is an array of objects"),
        ({"a": {1: 2}}, "loop.a has the key 1"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, where):
    with pytest.raises(ValueError, match=where):
        write_state(tmp_path, "loop", state)
