#!/usr/bin/env bash
D=${D:?}; export SLURM_CONF="$D/etc/slurm.conf"
scancel --user="$(id -un)" 2>/dev/null
for n in slurmd slurmctld slurmdbd mariadbd munged; do
  p=$(cat "$D/run/$n.pid" 2>/dev/null) || continue
  kill "$p" 2>/dev/null
  for _ in $(seq 150); do kill -0 "$p" 2>/dev/null || break; sleep 0.1; done
done
