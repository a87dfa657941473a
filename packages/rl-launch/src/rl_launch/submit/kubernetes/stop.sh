#!/bin/bash
# Runs in a pod of the cluster before it is ended: the run saves and ends first, if it is in progress. Kubernetes ends
# this script after the grace period.
running=$RL_RUN_DIR/jobs/$RAY_CLUSTER_NAME.running
if [[ -e $running ]]; then
    touch "$RL_RUN_DIR/jobs/$RAY_CLUSTER_NAME.stop"
    while [[ -e $running ]]; do
        sleep 1
    done
fi
