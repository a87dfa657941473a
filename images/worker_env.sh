#!/bin/bash
# Build the worker environment of one role of a recipe in an image, and write down what it holds.
set -euo pipefail
recipe=$1 role=$2 device=$3

export UV_CACHE_DIR=/var/cache/uv-rl UV_LINK_MODE=copy
rl worker-envs "$recipe" "cluster.device=$device" --role "$role"
for env in "$RL_HOME"/envs/*/; do
    uv pip freeze --quiet --python "$env/bin/python" > "/opt/rl/locks/$(basename "$env").txt"
done
