#!/usr/bin/env bash
# Trains on 6 to 8 nodes that may come and go: the job goes on while at least 6 are there.
#
#   On each:  NODES=6:8 FIRST=first-host examples/several-nodes/elastic.sh TRAIN_URL VAL_URL
#
# Nodes find one another at FIRST:RENDEZVOUS_PORT; FIRST is one of them, which keeps the rendezvous,
# so that one has to stay.
# When a node is lost the others end their step with an error, wait 30 s for who comes, and go on
# behind the last checkpoint, at most RESTARTS times. A node that comes later joins in the same way.
# The global batches stay what they were on any number of nodes.
#
# The rendezvous numbers nodes as they come, another way each time; which node reads what follows
# what lies in its cache (docs/howto/cluster.md). NODE=0 to NODES' larger number - 1, another on each node,
# fetches a share before the first start. A node is reached by its first address; if it has several
# networks, PEER_NETWORK=10.1. takes the first that begins so. CACHE, PEER_PORT, CHECKPOINT, …: as in torchrun.sh.
set -euo pipefail

TRAIN=${1:?"wanted two URLs: TRAIN_URL VAL_URL"}
VAL=${2:?"wanted two URLs: TRAIN_URL VAL_URL"}
: "${NODES:=6:8}" "${FIRST:=127.0.0.1}" "${RENDEZVOUS_PORT:=29400}" "${JOB:=train}" "${RESTARTS:=100}"
: "${GPUS:=8}" "${BATCH:=2048}" "${SEED:=0}" "${CACHE:=}" "${CACHE_BYTES:=500GB}" "${NODE:=}"
: "${PEER_PORT:=}" "${PEER_NETWORK:=}" "${PEER_TOKEN_FILE:=}"
: "${CHECKPOINT:=checkpoint.pt}" "${METRICS_PORT:=0}"

cache=()
if [ -n "$CACHE" ]; then
    cache=(--cache "$CACHE" --cache-bytes "$CACHE_BYTES")
    if [ -n "$NODE" ] && [ ! -e "${CHECKPOINT%.*}.json" ]; then
        penstock warm "$TRAIN" --cache "$CACHE" --max-bytes "$CACHE_BYTES" \
            --seed "$SEED" --global-batch-size "$BATCH" \
            --world-size "$((${NODES#*:} * GPUS))" --nodes "${NODES#*:}" --node-rank "$NODE"
    fi
fi
for host in $(hostname -I) ""; do
    if [[ $host == "$PEER_NETWORK"* ]]; then break; fi
done
if [ -n "$PEER_PORT" ]; then
    cache+=(--peers "$host:$PEER_PORT")
    if [ -n "$PEER_TOKEN_FILE" ]; then
        cache+=(--peer-token-file "$PEER_TOKEN_FILE")
    fi
fi
# Else it would be the host's name, which other nodes may not know.
own=(--local-addr="$host")
if [ "$host" = "$FIRST" ]; then own+=(--rdzv-conf=is_host=1); fi

# torch 2.13's agents share a store from round to round, and one that comes later never learns where.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$NODES" --nproc-per-node="$GPUS" --max-restarts="$RESTARTS" \
    --rdzv-id="$JOB" --rdzv-backend=c10d --rdzv-endpoint="$FIRST:$RENDEZVOUS_PORT" "${own[@]}" \
    "$(dirname "$0")/../classification/train.py" "$TRAIN" --val "$VAL" "${cache[@]}" \
    --seed "$SEED" --global-batch-size "$BATCH" --checkpoint "$CHECKPOINT" \
    --metrics-port "$METRICS_PORT"
