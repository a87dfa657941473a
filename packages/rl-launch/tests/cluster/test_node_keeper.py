"""The keeper of Ray nodes, with nodes that start at once in the place of Ray's."""

import subprocess
import sys
import time

import psutil
import pytest

from rl_launch.cluster.ray_nodes import state_of

KEEPER = """
import os
from rl_launch.cluster import node_keeper, virtual_cluster

class Nodes:
    address = "127.0.0.1:6379"
    def __init__(self, **settings): pass
    def add_node(self, **settings): pass
    def list_all_nodes(self): return []
    def shutdown(self): open("ended", "w").close()

node_keeper.Cluster = Nodes
node_keeper.keep([{}], os.getppid())
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
import os, subprocess, sys
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
keeper = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]], **pipes)
keeper.stdout.readline()
print(keeper.pid, flush=True)
"""

HANGING = """
import os, sys, time
from rl_launch.cluster import node_keeper, virtual_cluster

# The keeper takes the pipe for itself.
answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")

class Nodes:
    def __init__(self, **settings): pass
    def list_all_nodes(self): return []
    def add_node(self, **settings):
        print("ready", file=answers, flush=True)
        time.sleep(600)

node_keeper.Cluster = Nodes
node_keeper.END_S = 0.1
driver = int(sys.argv[1])
if sys.argv[2] == "before":
    print("ready", file=answers, flush=True)
    while os.getppid() == driver:
        time.sleep(0.01)
node_keeper.keep([{}], driver)
"""


@pytest.mark.parametrize("driver_ends", ["before", "during"])
def test_a_keeper_ends_with_its_driver_while_ray_does_not_start(driver_ends):
    driver = [sys.executable, "-c", DRIVER_OF_A_RAY_THAT_DOES_NOT_START, HANGING, driver_ends]
    keeper = psutil.Process(int(subprocess.run(driver, stdout=subprocess.PIPE, text=True, check=True).stdout))
    deadline = time.monotonic() + 60
    while state_of(keeper) != psutil.STATUS_DEAD:
        assert time.monotonic() < deadline
        time.sleep(0.05)
