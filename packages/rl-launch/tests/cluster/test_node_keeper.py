"""The keeper of Ray nodes, with nodes that start at once in the place of Ray's."""

import subprocess
import sys

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
