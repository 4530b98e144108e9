#!/usr/bin/env bash
# Trains on one node, or on several that are started one by one.
#
#   One node:           examples/torchrun.sh TRAIN_URL VAL_URL
#   Several, on each:   NODES=4 NODE_RANK=0 MASTER_ADDR=first-host examples/torchrun.sh TRAIN_URL VAL_URL
#
# CACHE is a folder on the node's NVMe: for remote data. Each node fetches its share before the
# training begins; leave that out, and the first epoch does it on the way.
# NODE_RANK is given, not found by a rendezvous: so each node reads what it warmed.
set -euo pipefail

TRAIN=$1
VAL=$2
: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}"
: "${GPUS:=8}" "${BATCH:=2048}" "${SEED:=0}" "${CACHE:=}" "${CACHE_BYTES:=500GB}"

cache=()
if [ -n "$CACHE" ]; then
    cache=(--cache "$CACHE" --cache-bytes "$CACHE_BYTES")
    penstock warm "$TRAIN" --cache "$CACHE" --max-bytes "$CACHE_BYTES" \
        --seed "$SEED" --global-batch-size "$BATCH" \
        --world-size "$((NODES * GPUS))" --nodes "$NODES" --node-rank "$NODE_RANK"
fi

exec torchrun --nnodes="$NODES" --nproc-per-node="$GPUS" --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    "$(dirname "$0")/train.py" "$TRAIN" --val "$VAL" "${cache[@]}" \
    --seed "$SEED" --global-batch-size "$BATCH" --checkpoint "${CHECKPOINT:-checkpoint.pt}"
