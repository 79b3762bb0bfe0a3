#!/usr/bin/env bash
# A real Slurm on this machine alone, for tests: slurmctld, slurmd and munge of Debian's packages, on loopback.
#
#   tests/multirun/slurm.sh install        apt-get install of the packages (Debian 12: Slurm 22.05), as root
#   tests/multirun/slurm.sh up FOLDER      start it; everything it writes is in FOLDER, nothing in /etc or /var
#   export SLURM_CONF=FOLDER/slurm.conf    then sbatch, squeue, scancel, and launcher=submitit_slurm
#   tests/multirun/slurm.sh down FOLDER    stop it
#
# There is no accounting database, so that sacct fails, as it does on small clusters. NODES=2 (default 1) nodes of CORES=4
# (default 4, whatever the machine has) cores; a job that takes more memory than it asked for is killed.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }

install() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
}

up() {
    local folder=$1 cores=${CORES:-4} memory host
    for program in slurmctld slurmd munged; do
        command -v "$program" >/dev/null || { echo "$program is missing: $0 install" >&2; exit 3; }
    done
    [ "$(id -u)" = 0 ] || { echo "slurmd has to be started by root" >&2; exit 3; }
    mkdir -p "$folder"/{state,spool}
    chmod 700 "$folder"
    host=$(hostname -s) memory=$(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
    head -c 1024 /dev/urandom > "$folder/munge.key"
    chmod 600 "$folder/munge.key"
    cat > "$folder/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17817
SlurmdPort=17818
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_min_interval=100000,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=${KILL_WAIT:-20}
MinJobAge=300
InactiveLimit=0
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores Sockets=1 CoresPerSocket=$cores ThreadsPerCore=1 RealMemory=$memory State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
    export SLURM_CONF=$folder/slurm.conf
    slurmctld
    slurmd
    for _ in $(seq 60); do
        [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && return
        sleep 0.5
    done
    tail -n 20 "$folder"/{slurmctld,slurmd,munged}.log >&2
    echo "Slurm did not come up" >&2
    down "$folder"
    exit 1
}

down() {
    local folder=$1 name pid
    export SLURM_CONF=$folder/slurm.conf
    timeout 10 scancel --user root --signal KILL --full 2>/dev/null || true
    timeout 10 scancel --user root 2>/dev/null || true
    for name in slurmd slurmctld munged; do
        [ -s "$folder/$name.pid" ] || continue
        pid=$(cat "$folder/$name.pid")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

case "${1:-}" in
    install) install ;;
    up | down) [ $# = 2 ] || usage; "$1" "$(realpath -m "$2")" ;;
    *) usage ;;
esac
