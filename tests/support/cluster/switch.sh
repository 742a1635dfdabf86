#!/bin/bash
# Process 1 of a namespace that holds a bridge, the hosts on it, and all they run: when it ends, the
# kernel takes everything with it. Usage: switch.sh STATE LIFELINE_FD SLURM HOST=ADDRESS...
# LIFELINE_FD is the read end of a pipe that only the test process holds open: at its death we go.
set -eu
state=$1 lifeline=$2 slurm=$3
shift 3
here=$(dirname "$0")
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
for host in "$@"; do
  name=${host%%=*} address=${host#*=}
  ip netns add "$name"
  ip link add "v-$name" master br0 type veth peer name eth0 netns "$name"
  ip link set "v-$name" up
  ip -n "$name" link set lo up
  ip -n "$name" addr add "$address/24" dev eth0
  ip -n "$name" link set eth0 up
  nsenter --net="/run/netns/$name" unshare --uts --mount --pid --ipc --fork --kill-child \
    "$here/host.sh" "$state" "$name" "$slurm" >"$state/$name/log" 2>&1 &
done
cat <&"$lifeline" >/dev/null
