#!/usr/bin/env bash
# Real single-node Slurm on loopback: no systemd, no root cgroups, everything under $D.
#   apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge slurmdbd mariadb-server
#   D=/some/dir tests/slurm/up.sh && export SLURM_CONF=$D/etc/slurm.conf      (stop: D=/some/dir tests/slurm/down.sh)
set -euo pipefail
D=${D:?}; H=$(hostname -s); MEM=$(slurmd -C | sed -n 's/.*RealMemory=\([0-9]*\).*/\1/p'); CPUS=$(nproc)
mkdir -p "$D"/{etc,state,spool,log,run,munge}
chmod 755 "$D" "$D/run"; chmod 700 "$D/munge"          # munged checks these (and that /tmp is sticky)
export SLURM_CONF="$D/etc/slurm.conf"
cat > "$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$H(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$D/run/munge.socket,cred_expire=5
SlurmctldPort=16817
SlurmdPort=16818
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.log
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStoragePass=$D/run/munge.socket
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
EnforcePartLimits=ALL
ReturnToService=2
KillWait=2
GresTypes=gpu
NodeName=$H NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=$MEM Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=$H Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=512 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=$H MaxTime=INFINITE State=UP DefMemPerCPU=512 PriorityTier=10 PreemptMode=OFF
CONF
for i in 0 1; do [ -c "$D/etc/nvidia$i" ] || mknod "$D/etc/nvidia$i" c 1 3; done   # pretend GPUs (copies of /dev/null)
echo "Name=gpu File=$D/etc/nvidia[0-1]" > "$D/etc/gres.conf"
cat > "$D/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$D/run/munge.socket
DbdHost=$H
DbdAddr=127.0.0.1
DbdPort=16819
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile=$D/run/slurmdbd.pid
LogFile=$D/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=13306
StorageUser=slurm
StoragePass=slurm-local
StorageLoc=slurm_acct_db
CONF
chmod 600 "$D/etc/slurmdbd.conf"
wait_for() { for _ in $(seq 150); do "$@" >/dev/null 2>&1 && return 0; sleep 0.1; done; echo "timed out: $*" >&2; tail -n 20 "$D"/log/*.log >&2; return 1; }
# 1 munge
[ -s "$D/munge/munge.key" ] || { head -c 1024 /dev/urandom > "$D/munge/munge.key"; chmod 400 "$D/munge/munge.key"; }
munged --socket="$D/run/munge.socket" --key-file="$D/munge/munge.key" --seed-file="$D/munge/seed" \
  --log-file="$D/munge/munged.log" --pid-file="$D/run/munged.pid" --origin=127.0.0.1 --num-threads=10
# 2 mariadb
[ -d "$D/mysql/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$D/mysql" \
  --auth-root-authentication-method=socket --skip-test-db > "$D/log/mariadb-install.log" 2>&1
mariadbd --no-defaults --user=root --datadir="$D/mysql" --socket="$D/run/mysql.sock" --pid-file="$D/run/mariadbd.pid" \
  --bind-address=127.0.0.1 --port=13306 --skip-name-resolve --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
  --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF --log-error="$D/log/mariadbd.log" </dev/null >/dev/null 2>&1 &
wait_for mariadb-admin --no-defaults --socket="$D/run/mysql.sock" ping
mariadb --no-defaults --socket="$D/run/mysql.sock" -e "CREATE DATABASE IF NOT EXISTS slurm_acct_db;
 CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm-local'; GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';"
# 3 slurmdbd  4 slurmctld  5 slurmd
slurmdbd; wait_for bash -c 'exec 3<>/dev/tcp/127.0.0.1/16819'
[ -n "$(sacctmgr -nP show cluster format=cluster)" ] || sacctmgr -i add cluster local >/dev/null
slurmctld -c; slurmd -c
wait_for bash -c '[ "$(sinfo -h -N -p debug -o %t)" = idle ]'
