#!/bin/bash
# Process 1 of one host: its own name, processes, /run, /dev/shm and network; everything else, such
# as /work and /tmp, is shared with the others as a cluster's file system is.
# Usage: host.sh STATE NAME SLURM
set -eu
state=$1 name=$2 slurm=$3
read -r pid _ </proc/self/stat # /proc is still the test process's: a pid that it can use
mount -t proc proc /proc
mount -t sysfs sysfs /sys
hostname "$name"
mount --bind "$state/$name/hostname" /etc/hostname
mount --bind "$state/hosts" /etc/hosts
mount --bind "$state/ssh" /etc/ssh
mount --bind "$state/shadow" /etc/shadow
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/munge
mount -t tmpfs tmpfs /dev/shm
# DeepSpeed answers SIGINT by `pkill -f` on its hosts, with a pattern that hits every job of this
# environment: it must not run on a machine that tests share with others.
mount --bind "$state/pkill" /usr/bin/pkill
if [ -e "$state/ssh/host_key" ]; then /usr/sbin/sshd -E "$state/$name/sshd.log"; fi
if [ "$slurm" = 1 ]; then
  mkdir -p /etc/slurm
  mount --bind "$state/slurm.etc" /etc/slurm
  chmod 755 /run/munge
  /usr/sbin/munged --force --num-threads=2 --key-file="$state/munge.key" \
    --seed-file="$state/$name/munge/seed" --log-file="$state/$name/munge/log" \
    --pid-file=/run/munge/munged.pid
  if [ -e "$state/$name/controller" ]; then /usr/sbin/slurmctld; else /usr/sbin/slurmd; fi
fi
echo "$pid" >"$state/$name/pid.part"
mv "$state/$name/pid.part" "$state/$name/pid" # whole at once: whoever sees it may enter
set +e
while :; do
  sleep 1000 &
  wait $!
done
