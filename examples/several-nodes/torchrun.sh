#!/usr/bin/env bash
# Trains on one node, or on several that are started one by one.
#
#   One node:           examples/several-nodes/torchrun.sh TRAIN_URL VAL_URL
#   Several, on each:   NODES=4 NODE_RANK=0 MASTER_ADDR=first-host examples/several-nodes/torchrun.sh TRAIN_URL VAL_URL
#
# CACHE is a folder on the node's NVMe: for remote data. Each node fetches its share before the
# training begins; leave that out, and the first epoch does it on the way. Behind a checkpoint only
# an empty cache is filled: the job then reads what caches hold where they are, however nodes are
# numbered. Local data are read where they lie.
# NODE_RANK is given, not found by a rendezvous: so each node reads what it warmed.
#
# PEER_PORT=7077, with CACHE: nodes ask one another's caches before the remote (docs/howto/sharing.md;
# needs penstock[cluster] for TLS). A node's address is its first one; if it has several networks,
# PEER_NETWORK=10.1. takes the first that begins so. PEER_TOKEN_FILE is optional.
# CHECKPOINT: on a file system that all nodes see. METRICS_PORT=9400: see examples/several-nodes/prometheus.yaml.
set -euo pipefail

TRAIN=${1:?"wanted two URLs: TRAIN_URL VAL_URL"}
VAL=${2:?"wanted two URLs: TRAIN_URL VAL_URL"}
: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}"
: "${GPUS:=8}" "${BATCH:=2048}" "${SEED:=0}" "${CACHE:=}" "${CACHE_BYTES:=500GB}"
: "${PEER_PORT:=}" "${PEER_NETWORK:=}" "${PEER_TOKEN_FILE:=}"
: "${CHECKPOINT:=checkpoint.pt}" "${METRICS_PORT:=0}"

cache=()
if [ -n "$CACHE" ]; then
    cache=(--cache "$CACHE" --cache-bytes "$CACHE_BYTES")
    order=(--seed "$SEED")
    if [ -e "${CHECKPOINT%.*}.json" ]; then
        order=(--state "${CHECKPOINT%.*}.json" --if-empty)
    fi
    penstock warm "$TRAIN" --cache "$CACHE" --max-bytes "$CACHE_BYTES" \
        "${order[@]}" --global-batch-size "$BATCH" \
        --world-size "$((NODES * GPUS))" --nodes "$NODES" --node-rank "$NODE_RANK"
fi
if [ -n "$PEER_PORT" ]; then
    for host in $(hostname -I) ""; do
        if [[ $host == "$PEER_NETWORK"* ]]; then break; fi
    done
    cache+=(--peers "$host:$PEER_PORT")
    if [ -n "$PEER_TOKEN_FILE" ]; then
        cache+=(--peer-token-file "$PEER_TOKEN_FILE")
    fi
fi

exec torchrun --nnodes="$NODES" --nproc-per-node="$GPUS" --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    "$(dirname "$0")/../classification/train.py" "$TRAIN" --val "$VAL" "${cache[@]}" \
    --seed "$SEED" --global-batch-size "$BATCH" --checkpoint "$CHECKPOINT" \
    --metrics-port "$METRICS_PORT"
