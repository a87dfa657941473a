"""The keeper of Ray nodes, with nodes that start at once in the place of Ray's."""

import subprocess
import sys
import time

import psutil

from rl_launch.cluster.ray_nodes import state_of

KEEPER = """
from rl_launch.cluster import node_keeper, virtual_cluster

class Nodes:
    address = "127.0.0.1:6379"
    def __init__(self, **settings): pass
    def add_node(self, **settings): pass
    def list_all_nodes(self): return []
    def shutdown(self): open("ended", "w").close()

node_keeper.Cluster = Nodes
node_keeper.keep([{}])
"""


def test_nodes_end_without_a_traceback_if_the_driver_stopped_waiting_for_them(tmp_path):
    # its input stays open: only the lost reader of the answer can end it
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    keeper.stdout.close()
    try:
        assert keeper.wait(120) == 0
        assert keeper.stderr.read() == ""
        assert (tmp_path / "ended").exists()
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
        keeper.stderr.close()


DRIVER_OF_A_RAY_THAT_DOES_NOT_START = """
import subprocess, sys
keeper = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
keeper.stdout.readline()
print(keeper.pid, flush=True)
"""

HANGING = """
import time
from rl_launch.cluster import node_keeper, virtual_cluster

class Nodes:
    def __init__(self, **settings): pass
    def list_all_nodes(self): return []
    def add_node(self, **settings): time.sleep(600)

node_keeper.Cluster = Nodes
node_keeper.END_S = 0.1
print("ready", flush=True)
node_keeper.keep([{}])
"""


def test_a_keeper_ends_with_its_driver_while_ray_does_not_start():
    driver = [sys.executable, "-c", DRIVER_OF_A_RAY_THAT_DOES_NOT_START, HANGING]
    keeper = psutil.Process(int(subprocess.run(driver, capture_output=True, text=True, check=True).stdout))
    deadline = time.monotonic() + 60
    while state_of(keeper) != psutil.STATUS_DEAD:
        assert time.monotonic() < deadline
        time.sleep(0.05)
