#!/bin/bash
# Entrypoint of the job on the head: starts or resumes the run with the command that is given as arguments.
# KubeRay starts a new cluster, and this script again, after an exit code other than 0.
set -uo pipefail

# exit code of the driver: the run is not finished, and the same command resumes it
readonly unfinished=75

jobs=$RL_RUN_DIR/jobs
# files by which the pods of this cluster agree on its end, see stop.sh
running=$jobs/$RAY_CLUSTER_NAME.running
stop=$jobs/$RAY_CLUSTER_NAME.stop

say() { echo "$(date '+%F %T') $*" | tee -a "$logs/job.log"; }
pause() { sleep 1 & wait $!; } # a signal ends it at once
# The newest checkpoint of a run that trains; the number of lines about steps of one that serves.
progress() {
    find "$RL_RUN_DIR/checkpoints" -maxdepth 1 -name 'step_*' -printf '%f\n' 2> /dev/null | sort -V | tail -n 1
    grep -c . "$RL_RUN_DIR/tenants.jsonl" 2> /dev/null
}

# Count the attempts in a row that have left no new checkpoint.
makes_progress() {
    local counter=$jobs/attempts_without_checkpoint count=0
    [[ $(progress) != "$newest" ]] || count=$(($(cat "$counter" 2> /dev/null || echo 0) + 1))
    echo "$count" > "$counter"
    ((count < RL_MAX_ATTEMPTS_WITHOUT_CHECKPOINT))
}

# End the job so that KubeRay does not try it again, as it does with a job that has failed.
give_up() {
    say "$1. The job is not continued"
    trap 'exit 1' TERM
    ray job stop --no-wait --address http://127.0.0.1:8265 "$RL_JOB" > /dev/null && sleep 60 &
    wait $!
    exit 1
}

mkdir -p "$jobs"
attempt=0
until mkdir "$jobs/$RL_JOB.$attempt" 2> /dev/null; do
    ((++attempt))
done
logs=$jobs/$RL_JOB.$attempt
newest=$(progress)
rm -f "$stop"
say "attempt $attempt on the cluster $RAY_CLUSTER_NAME, with the driver's log in $logs/driver.log"

is_told=''
# when a job is stopped, Ray sends SIGTERM to the driver as well; a second one would end the driver before it has saved
trap 'is_told=1' TERM
"$@" > "$logs/driver.log" 2>&1 &
driver=$!
touch "$running"
while kill -0 "$driver" 2> /dev/null; do
    if [[ ! $is_told && -e $stop ]]; then
        is_told=1
        say "a pod is about to end; the run saves and ends"
        kill -TERM "$driver"
    fi
    pause
done
wait "$driver"
status=$?
rm -f "$running" "$stop"

if ((status == 0)); then
    say "finished"
    exit 0
fi
if ((status != unfinished)) && ! [[ $is_told && $status -gt 128 ]]; then
    give_up "the driver has failed with exit code $status"
fi
makes_progress || give_up "$RL_MAX_ATTEMPTS_WITHOUT_CHECKPOINT attempts in a row have left no new checkpoint"
say "the run has ended before its last step; the next attempt resumes it"
exit $unfinished
