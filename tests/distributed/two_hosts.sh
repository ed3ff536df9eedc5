#!/usr/bin/env bash
# Two hosts, made of network namespaces, train together; one is cut off in mid-step. Shows that the other ends with an error within
# its time limit, and that the run goes on where it was on one host with every row once.
#
#   tests/distributed/two_hosts.sh [FOLDER]        as the superuser; a minute
#
# FOLDER (by default a temporary one, kept only on failure) is the storage that both hosts see.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ "$(id -u)" -ne 0 ] || ! command -v ip > /dev/null; then
    echo "two_hosts: network namespaces need the superuser and the command ip (iproute2)" >&2
    exit 2
fi
python=${PYTHON:-python}
folder=${1:-$(mktemp -d)}
timeout_s=6  # ddp_timeout of the run
a=multipack-a-$$ b=multipack-b-$$
pids=()

# kill_host NAMESPACE: every process in it; torchrun gives its workers sessions of their own, so no process group holds them all.
kill_host() {
    ip netns pids "$1" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
}
cleanup() {
    for host in "$a" "$b"; do
        kill_host "$host"
        ip netns del "$host" 2>/dev/null || true
    done
}
trap cleanup EXIT

fail() {
    echo "two_hosts: $1" >&2
    tail -n 25 "$folder"/host-*.log >&2
    echo "two_hosts: logs and checkpoints are in $folder" >&2
    exit 1
}

ip netns add "$a"
ip netns add "$b"
ip link add veth-a netns "$a" type veth peer name veth-b netns "$b"
for host in a b; do
    name=${!host}
    ip -n "$name" link set lo up
    ip -n "$name" link set "veth-$host" up
done
ip -n "$a" addr add 10.77.0.1/24 dev veth-a
ip -n "$b" addr add 10.77.0.2/24 dev veth-b

$python -c '
import json, sys
for row in range(300):
    print(json.dumps({"text": "abcdefgh "[row % 9] * (5 + row * 37 % 56)}))
' > "$folder/texts.jsonl"
arguments=(
    -m multipack.train sft --data "$folder/texts.jsonl" --dataset_prepared_path "$folder/prepared" --output_dir "$folder/out"
    --sequence_len 64 --overrides_of_model_config '{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}'
    --lr_scheduler constant --bf16 false --num_epochs 6 --save_steps 7 --zero_stage 2 --log_rows true --ddp_timeout $timeout_s
)
export OMP_NUM_THREADS=1

# host RANK NAMESPACE DEVICE: one node of the run.
host() {
    GLOO_SOCKET_IFNAME=$3 ip netns exec "$2" "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$1" \
        --master-addr 10.77.0.1 --master-port 29577 "${arguments[@]}" > "$folder/host-$1.log" 2>&1 &
    pids+=($!)
}
host 0 "$a" veth-a
host 1 "$b" veth-b

steps() { grep -c '"kind": "train"' "$folder/out/metrics.jsonl" 2>/dev/null || true; }
for _ in $(seq 600); do
    [ "$(steps || echo 0)" -ge 20 ] 2>/dev/null && break
    kill -0 "${pids[0]}" 2>/dev/null || fail "the run ended before it could be cut"
    sleep 0.1
done
[ "$(steps)" -ge 20 ] || fail "no 20 steps within a minute"

echo "two_hosts: cutting host b off after step $(steps)"
ip -n "$b" link set veth-b down
cut=$SECONDS
timeout 60 tail --pid="${pids[0]}" -f /dev/null || fail "host a still ran a minute after the cut"
code=0
wait "${pids[0]}" || code=$?
seconds=$((SECONDS - cut))
[ $code -ne 0 ] || fail "host a ended without an error"
# The limit of one collective, and what torchrun takes to notice and to end.
[ $seconds -le $((timeout_s + 15)) ] || fail "host a needed $seconds s to notice, its limit is $timeout_s s"
grep -q "Timed out waiting" "$folder/host-0.log" || fail "host a does not say what it waited for"
echo "two_hosts: host a ended with code $code after $seconds s"
kill_host "$b"

$python -m torch.distributed.run --standalone --nproc-per-node 1 "${arguments[@]}" --resume_from_checkpoint last \
    > "$folder/host-0.log" 2>&1 || fail "the run did not go on on one host"
$python - "$folder/out/rows" <<'PYTHON' || fail "rows were lost or repeated"
import json, sys
from pathlib import Path
lines = [line for path in Path(sys.argv[1]).iterdir() for line in path.read_text().splitlines()]
rows = sorted(row for line in lines for row in json.loads(line)["rows"])
assert rows == sorted([*range(300)] * 6), f"{len(rows)} rows, {len(set(rows))} of them different"
PYTHON
echo "two_hosts: resumed on one host, each of 300 rows once in each of 6 epochs"
[ $# -gt 0 ] || rm -r "$folder"
