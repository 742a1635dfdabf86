#!/bin/bash
# Trains {{ name }} on {{ nodes }} nodes under torchrun: nodes may die, rejoin, or be replaced.
# Written by `bigtrain launch torchrun`. Start it on every node, also on one that joins later:
#
#   bash {{ file }}
#
# {{ endpoint }} is the rendezvous. The machine that serves it must stay up: a node of that name serves
# it automatically; on a machine that is not one of the nodes, serve it before starting any node:
#
#   bash {{ file }} serve
#
# After a run has ended, restart this server.

set -u
{{ setup }}script={{ quoted_file }}
checkout={{ checkout }}
python={{ python }}
endpoint={{ endpoint }}
arguments=({{ arguments }})

fail() {
  echo "$script: $*" >&2
  exit 2
}
cd {{ directory }} || fail "the folder of this run must exist under the same path on every node"
[ -f "$checkout/bigtrain/train.py" ] || fail "$checkout is not a checkout on this node"
[ -x "$python" ] || fail "$python does not exist on this node"
# DeepSpeed compiles its CPU operators with the ninja next to python.
export PATH="${python%/*}:$PATH" PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}"

if [ "${1:-}" = serve ]; then
  exec "$python" -m bigtrain.launchers.rendezvous_server "$endpoint" "${@:2}"
fi
[ "$#" = 0 ] || fail "usage: no arguments, or: serve [ADDRESS]"
command -v setpriv >/dev/null || fail "setpriv is missing: install util-linux"
directory=$("$python" -m bigtrain.cli check --world-size {{ most_processes }} \
  --show output.directory --config "${arguments[@]}") || exit 2
echo "$script: on $(hostname), run directory $directory"

# Without it, a joining node gets the store address of an earlier round.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-{{ threads }}}"
# The ranks of an agent that dies are killed with it, so that the other nodes notice.
exec "$python" -m bigtrain.launchers.agent {{ fork }}\
  --nnodes={{ nnodes }} --nproc-per-node={{ processes }} --max-restarts={{ restarts }} \
  --rdzv-backend=bigtrain --rdzv-endpoint="$endpoint" --rdzv-id={{ name }} \
  --rdzv-conf={{ settings }} \
  --monitor-interval=0.2 \
  {{ command }}"$checkout/bigtrain/train.py" --config "${arguments[@]}"
