"""Files of a checkpoint: digests taken as bytes go by, and shares of the work of verifying them."""

import gc
import hashlib
import math
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import SavePlanner

from rl_core.errors import CheckpointDamaged, RLError
from rl_core.model import SavedFile
from rl_core.torch.training import checkpoint_files
from rl_core.torch.training.checkpoint_files import WRITERS, DigestingWriter, KeptSavePlanner, deal, verify_files


def test_digests_taken_while_writing_are_those_of_the_files(tmp_path):
    writer = DigestingWriter(tmp_path)
    state = {"weights": torch.randn(300, 1000), "moments": torch.randn(7).to(torch.bfloat16), "kind": "text"}
    dcp.save(state, storage_writer=writer, no_dist=True)
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert writer.written == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    }
    loaded = {"weights": torch.zeros(300, 1000), "moments": torch.zeros(7, dtype=torch.bfloat16), "kind": ""}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[name], state[name]) for name in ("weights", "moments"))


def test_nothing_is_read_to_digest_it(tmp_path, monkeypatch):
    opened, original = [], type(tmp_path).open

    def noted(path, mode="r", *args, **kwargs):
        opened.append(mode)
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(type(tmp_path), "open", noted)
    dcp.save({"weights": torch.randn(10)}, storage_writer=DigestingWriter(tmp_path), no_dist=True)
    assert set(opened) == {"wb"}


def test_one_tensor_is_held_at_a_time_and_a_view_is_written_without_what_it_views(tmp_path, monkeypatch):
    whole, saved, original = torch.randn(8, 1000), [], torch.save

    def noted(tensor, stream):
        assert all(earlier() is None for earlier in saved)
        saved.append(weakref.ref(tensor))
        original(tensor, stream)

    monkeypatch.setattr(torch, "save", noted)
    writer = DigestingWriter(tmp_path)
    dcp.save({f"row{index}": whole[index] for index in range(8)}, storage_writer=writer, no_dist=True)
    assert len(saved) == 8
    assert sum(size for size, _ in writer.written.values()) < 2 * whole.nbytes
    loaded = {"row5": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["row5"], whole[5])


def test_much_is_written_by_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 8000)
    state = {f"row{index}": torch.randn(1000 + index) for index in range(8)}
    writer = DigestingWriter(tmp_path)
    dcp.save(state, storage_writer=writer, no_dist=True)
    shards = sorted(name for name in writer.written if name.endswith(".distcp"))
    assert shards == [f"__0_{number}.distcp" for number in range(WRITERS)]
    assert all(
        writer.written[path.name][1] == hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()
    )
    sizes = [writer.written[name][0] for name in shards]
    assert max(sizes) < 1.1 * min(sizes)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@given(st.lists(st.integers(0, 10**9), max_size=30), st.integers(1, 8))
def test_shares_hold_every_file_once_and_about_as_many_bytes(sizes, num_shares):
    files = [SavedFile(f"f{number}", size, None, 0) for number, size in enumerate(sizes)]
    shares = deal(files, num_shares)
    assert sorted(file.path for share in shares for file in share) == sorted(file.path for file in files)
    loads = [sum(file.size for file in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert sum(loads) == pytest.approx(math.fsum(sizes))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "shorter": lambda path: path.write_bytes(b"part"),
    "other contents": lambda path: path.write_bytes(b"changed!"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_file_that_differs_is_damage(tmp_path, group, case):
    path = tmp_path / "weights"
    path.write_bytes(b"contents")
    file = SavedFile("weights", 8, hashlib.sha256(b"contents").hexdigest(), 0)
    verify_files(tmp_path, [file], group)
    DAMAGE[case](path)
    with pytest.raises(CheckpointDamaged, match="weights"):
        verify_files(tmp_path, [file], group)


@pytest.mark.parametrize(
    ("target", "reason"), [("/proc/self/mem", "Input/output error"), ("weights", "Too many levels")]
)
def test_a_file_that_cannot_be_read_is_not_damage(tmp_path, group, target, reason):
    (tmp_path / "weights").symlink_to(target)  # the first can be opened and not read, the second has no end
    with pytest.raises(RLError, match=f"could not be read: .*{reason}.*{tmp_path / 'weights'}") as raised:
        verify_files(tmp_path, [SavedFile("weights", 0, "of other contents", 0)], group)
    assert not isinstance(raised.value, CheckpointDamaged)


def test_damage_that_one_rank_finds_does_not_hide_that_another_could_not_read(tmp_path, group, monkeypatch):
    def gathered(everyone, found, group):
        everyone[:] = [CheckpointDamaged("damaged"), RLError("could not be read")]

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    with pytest.raises(RLError, match="could not be read"):
        verify_files(tmp_path, [SavedFile("weights", 0, None, 0)], group)


def save(folder, planner, **tensors):
    dcp.save(dict(tensors), checkpoint_id=folder, planner=planner, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def planned(monkeypatch):
    """How many whole plans were made."""
    made = []
    whole = KeptSavePlanner._create_global_plan
    monkeypatch.setattr(
        KeptSavePlanner, "_create_global_plan", lambda self, plans: made.append(len(plans)) or whole(self, plans)
    )
    return made


def is_kept(planner: KeptSavePlanner) -> bool:
    """Return whether the next save of the same tensors needs no new plan on this rank."""
    return planner._cached_plans_key in SavePlanner._cached_final_save_plan


def test_a_second_save_of_the_same_tensors_needs_no_plan_and_has_its_own_values(tmp_path, planned):
    planner = KeptSavePlanner()
    for number in range(3):
        save(tmp_path / str(number), planner, weight=torch.randn(3, 2), moment=torch.randn(5))
    assert planned == [1]
    assert is_kept(planner)


def test_python_looks_for_no_garbage_while_a_save_is_planned(tmp_path, monkeypatch):
    seen = []
    whole = KeptSavePlanner._create_global_plan

    def create(self, plans):
        seen.append(gc.isenabled())
        return whole(self, plans)

    monkeypatch.setattr(KeptSavePlanner, "_create_global_plan", create)
    planner = KeptSavePlanner()
    save(tmp_path / "first", planner, weight=torch.randn(3, 2))
    assert (seen, gc.isenabled()) == ([False], True)
    planner.create_local_plan()
    planner.end_planning()
    assert gc.isenabled(), "a plan that fails leaves nothing behind"


def test_other_tensors_are_planned_anew(tmp_path, planned):
    planner = KeptSavePlanner()
    save(tmp_path / "first", planner, weight=torch.randn(3, 2))
    save(tmp_path / "more", planner, weight=torch.randn(3, 2), moment=torch.randn(5))
    save(tmp_path / "larger", planner, weight=torch.randn(4, 2), moment=torch.randn(5))
    assert planned == [1, 1, 1]


def test_planners_share_nothing_and_leave_nothing(tmp_path, planned):
    planners = [KeptSavePlanner(), KeptSavePlanner()]
    for planner in planners:
        save(tmp_path / str(id(planner)), planner, weight=torch.randn(3, 2))
    assert planned == [1, 1]
    planners[0].forget()
    assert [is_kept(planner) for planner in planners] == [False, True]
    planners[1].forget()
    kept = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    keys = {planner._cached_plans_key for planner in planners}
    assert not any(keys & plans.keys() for plans in kept)
