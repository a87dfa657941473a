import os

import pytest

from rl_launch.cluster import node_task
from rl_launch.cluster.node_task import NodeFacts, interface_of, listing, meet, usable_cores
from rl_launch.cluster.nodes import PreparedNode


def test_gloo_and_nccl_use_the_interface_of_the_nodes_address_unless_its_ray_was_told_another():
    plain = PreparedNode("10.0.0.2", NodeFacts(8, "eth0", {}), {})
    assert plain.network_variables == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    told = PreparedNode("10.0.0.2", NodeFacts(8, "eth0", {"NCCL_SOCKET_IFNAME": "ib0"}), {})
    assert told.network_variables == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert PreparedNode("10.0.0.2", NodeFacts(8, "", {}), {}).network_variables == {}


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", "lo"), ("127.0.0.9", "lo"), ("203.0.113.7", "")])
def test_an_interface_is_found_by_its_address(address, interface):
    assert interface_of(address) == interface


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 6), ("250000 100000", 3), ("5000 100000", 1)])
def test_cores_are_those_that_a_process_may_use(monkeypatch, tmp_path, limit, cores):
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(node_task, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert usable_cores() == cores


def test_a_folder_of_the_same_name_with_another_token_is_not_the_drivers(tmp_path):
    (tmp_path / "driver").write_text("an earlier start")
    assert meet(str(tmp_path), "this start", "node", [], 0.0).problem == "it is a different folder under the same name"
    assert not (tmp_path / "node").exists()


def test_folders_with_other_files_or_sizes_are_told_apart(tmp_path):
    for name, text in (("a", "12"), ("b", "12"), ("c", "123")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(text)
    assert listing(str(tmp_path / "a")) == listing(str(tmp_path / "b")) != listing(str(tmp_path / "c"))
    assert listing(str(tmp_path / "absent")) == ""
