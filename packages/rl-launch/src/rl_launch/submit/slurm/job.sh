#!/bin/bash
@HEADER@

# shellcheck disable=SC2317,SC2329  # functions are called by traps and in other shells
set -uo pipefail

# With --export=NONE Slurm would also give the steps no variable of this script.
export SLURM_EXPORT_ENV=ALL

@SETTINGS@

job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
jobs=$run/jobs
logs=$jobs/$attempt
scratch=$local_folder/rl-$job
first=$SLURMD_NODENAME

# exit code of the driver: the run is not finished, and the same command resumes it
readonly unfinished=75

# What a signal asks for: to continue in another attempt, or to cancel the run.
stop=''
port=''
# Process ids.
head='' others='' driver=''

# What runs a command where Ray and the driver belong: on this node, and on the others.
@COMMANDS@

say() { echo "$(date '+%F %T') $*"; }
is_running() { kill -0 "$1" 2> /dev/null; }
pause() { sleep 1 & wait $!; } # a signal ends the wait at once
has_started() { grep -ls "Ray runtime started" "$@"; }
num_started() { has_started "$logs"/ray-*.log | wc -l; }
is_open() { (exec 3<> "/dev/tcp/$1/$2") 2> /dev/null; }
job_field() { scontrol show job "$SLURM_JOB_ID" | sed -n "s/.*\b$1=\([^ ]*\).*/\1/p"; }
is_preempted() { [[ $(job_field PreemptTime) == [0-9]* ]]; }
# The newest checkpoint of a run that trains; the number of lines about steps of one that serves.
progress() {
    find "$run/checkpoints" -maxdepth 1 -name 'step_*' -printf '%f\n' 2> /dev/null | sort -V | tail -n 1
    grep -c . "$run/tenants.jsonl" 2> /dev/null
}

# End the processes that this job has started on this node, and remove its folder. Other jobs are left alone.
clean() {
    local left
    unset RL_JOB
    for _ in {1..50}; do
        left=$(self=$BASHPID; grep -slz "^RL_JOB=$job\$" /proc/[0-9]*/environ | cut -d / -f 3 | grep -vxe $$ -e "$self")
        [[ $left ]] || break
        echo "$left" | xargs kill -KILL 2> /dev/null
        sleep 0.1
    done
    rm -rf "$scratch"
}

prepare() {
    clean
    (umask 077 && mkdir -p "$scratch") && [[ -O $scratch ]]
}

# Whether Ray's client is installed, whose server would take a port that all jobs on this node share.
has_client() { "$(dirname "$(command -v ray)")/python3" -c 'import grpc' 2> /dev/null; }

# Ray on this node. If the job is cancelled, Slurm sends SIGTERM here. A busy node may miss a deadline of Ray's.
run_ray() {
    local log options=("$@")
    log=$logs/ray-$(hostname).log
    [[ $1 != --head ]] || ! has_client || options+=(--ray-client-server-port=$((port + 7)))
    trap 'clean; exit 143' TERM
    for _ in {1..3}; do
        RL_JOB=$job ray start --block --num-cpus="$SLURM_CPUS_ON_NODE" "${options[@]}" > "$log" 2>&1 &
        wait $!
        [[ ! $(has_started "$log") ]] || break
        prepare
    done
    return 1
}

# The driver. SIGUSR1 tells it to save and end. If this is a step, srun takes SIGTERM as an order to kill, and passes
# SIGUSR1 on to every process of the step.
run_driver() {
    local process='' is_told='' status
    trap 'is_told=1; [[ ! $process ]] || kill -TERM "$process"' USR1
    (trap '' USR1 && exec "$@") &
    process=$!
    [[ ! $is_told ]] || kill -TERM "$process"
    wait "$process"
    status=$?
    while is_running "$process"; do # the wait was ended by a signal
        wait "$process"
        status=$?
    done
    return "$status"
}

# Code for `bash -c` that calls one of these functions with arguments, in a process of its own.
code_of() { echo "$(declare -p job logs scratch port); $(declare -f is_running has_started has_client clean prepare "$1"); $1 \"\$@\""; }

on_each_node() {
    local num_nodes
    num_nodes=$(job_field NumNodes) # without those that are lost
    timeout 60 srun --overlap --whole --nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 \
        bash -c "$(code_of "$1")" "$1"
}

# Count the attempts in a row that have left no new checkpoint.
makes_progress() {
    local counter=$jobs/attempts_without_checkpoint count=0
    [[ $(progress) != "$newest" ]] || count=$(($(cat "$counter" 2> /dev/null || echo 0) + 1))
    echo "$count" > "$counter"
    ((count < max_attempts_without_checkpoint))
}

@CONTINUATION@

# End this attempt with an exit code and a reason.
end() {
    local code=$1
    say "$2"
    [[ ! $head ]] || { kill "$head" ${driver:+"$driver"}; wait "$head" ${driver:+"$driver"}; } 2> /dev/null
    # preemption has ended everything on the other nodes, and leaves little time
    if is_preempted; then clean; else on_each_node clean; fi
    if [[ $stop == cancel ]]; then
        code=0
    elif ((code == unfinished)) && makes_progress; then
        continue_later
        exit $unfinished
    elif ((code == unfinished)); then
        say "not continued: $max_attempts_without_checkpoint attempts in a row have left no new checkpoint"
        code=1
    fi
    end_chain
    exit "$code"
}

# Leave if a signal has asked for it, or if one of these processes has ended.
check_start() {
    [[ ! $stop ]] || end $unfinished "ended before the run had started"
    for process in "$@"; do
        is_running "$process" && continue
        is_preempted && end $unfinished "preempted before the run had started"
        end 1 "Ray did not start on every node. See $logs/ray-*.log"
    done
}

tell() {
    [[ ! $stop ]] || return
    stop=$1
    say "$2"
    [[ ! $driver ]] || kill -USR1 "$driver"
}
trap 'tell continue "the job is about to end; the run saves and ends"' USR1
trap 'tell cancel "cancelled; the run saves and ends"' USR2
trap 'say "ended by Slurm"; clean; exit 143' TERM

mkdir -p "$logs"
newest=$(progress)
say "attempt $attempt on $SLURM_JOB_NODELIST, with logs in $logs"
on_each_node prepare || end 1 "a node cannot be prepared"
export TMPDIR=$scratch

# a block of 500 ports below those that Linux gives to clients, another one for each job on a node
port=$((first_port + SLURM_JOB_ID % 20 * 500))
for _ in {1..20}; do
    is_open localhost "$port" || break
    port=$((first_port + (port - first_port + 500) % 10000))
done
address=$(hostname):$port
ray_options+=(
    --temp-dir="$scratch/ray" --num-gpus="$num_gpus" --include-log-monitor=false
    --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2)) --runtime-env-agent-port=$((port + 3))
    --dashboard-agent-grpc-port=$((port + 4)) --dashboard-agent-listen-port=$((port + 5))
    --metrics-export-port=$((port + 6)) --min-worker-port=$((port + 20)) --max-worker-port=$((port + 499))
)

# whoever reads this file can run code on the job's nodes
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/ray-token
# Ray's workers are the work, not its background; and no idle one for each core, as they have interpreters of their own
export RAY_worker_niceness=0 RAY_prestart_worker_first_driver=0
(umask 077 && od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

"${on_first[@]}" bash -c "$(code_of run_ray)" run_ray --head --port="$port" \
    --include-dashboard=false --no-monitor --disable-usage-stats "${ray_options[@]}" 2> "$logs/first.log" &
head=$!
until (($(num_started) == 1)); do
    check_start "$head"
    pause
done
if ((SLURM_NNODES > 1)); then
    "${on_others[@]}" bash -c "$(code_of run_ray)" run_ray --address="$address" "${ray_options[@]}" \
        2> "$logs/others.log" &
    others=$!
    disown "$others" # without a message when it is ended
    until (($(num_started) == SLURM_NNODES)); do
        check_start "$head" "$others"
        pause
    done
fi
say "Ray runs on $SLURM_NNODES nodes at $address"
export RAY_ADDRESS=$address
declare -p RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH > "$logs/ray.env" # for rl submit attach

@PREFLIGHT@

@LIMIT@
"${on_first[@]}" bash -c "$(code_of run_driver)" run_driver \
    @TRAIN@ \
    > "$logs/driver.log" 2>&1 &
driver=$!
[[ ! $stop ]] || kill -USR1 "$driver"

while is_running "$driver" && is_running "$head"; do
    if [[ $others ]] && ! is_running "$others"; then
        say "Ray has ended on all other nodes"
        others=''
        ! is_preempted || end $unfinished "preempted; the next attempt resumes from the newest checkpoint"
    fi
    pause
done
is_running "$head" || end $unfinished "Ray has ended on $first; the next attempt resumes from the newest checkpoint"
wait "$driver"
status=$?
((status != 0)) || end 0 "finished"
((status != unfinished)) || end $unfinished "the run has ended before its last step"
[[ $stop ]] && ((status > 128)) && end $unfinished "the run was ended while it started"
is_preempted && end $unfinished "preempted; the next attempt resumes from the newest checkpoint"
end "$status" "the driver has failed with exit code $status. See $logs/driver.log"
