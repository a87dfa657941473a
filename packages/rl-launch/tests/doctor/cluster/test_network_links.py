"""Links of machines whose /sys is made up."""

import pytest

from rl_launch.doctor.cluster.node_readings import ethernet_rate, infiniband_ports


@pytest.fixture
def sys(tmp_path):
    for name, speed in {"eth0": "10000\n", "veth1": "-1\n", "ib0": "not a number\n"}.items():
        folder = tmp_path / "class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(speed)
    ports = {
        "mlx5_0/ports/1": ("4: ACTIVE\n", "400 Gb/sec (4X NDR)\n", "5: LinkUp\n"),
        "mlx5_1/ports/1": ("2: INIT\n", "400 Gb/sec (4X NDR)\n", "5: LinkUp\n"),
        "mlx5_2/ports/1": ("1: DOWN\n", "10 Gb/sec (4X SDR)\n", "3: Disabled\n"),
    }
    for name, (state, rate, physical) in ports.items():
        folder = tmp_path / "class/infiniband" / name
        folder.mkdir(parents=True)
        for file, text in {"state": state, "rate": rate, "phys_state": physical}.items():
            (folder / file).write_text(text)
    return tmp_path


def test_rates_are_bytes_and_virtual_interfaces_have_none(sys):
    assert ethernet_rate("eth0", sys) == 1.25e9
    assert [ethernet_rate(name, sys) for name in ("veth1", "ib0", "absent", "")] == [None] * 4


def test_active_ports_have_rates_and_connected_ports_that_are_not_active_are_listed(sys):
    assert infiniband_ports(sys) == ({"mlx5_0/1": 50e9}, ["mlx5_1/1 (INIT)"])


def test_a_machine_without_infiniband_has_no_ports(tmp_path):
    assert infiniband_ports(tmp_path) == ({}, [])
