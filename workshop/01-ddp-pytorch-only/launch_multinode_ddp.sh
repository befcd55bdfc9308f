#!/usr/bin/env bash
# Launches train_ddp.py on several machines by ssh, one torchrun on each; with --local, on two "nodes" of this machine.
#
#   ./launch_multinode_ddp.sh --hosts node1,node2 --nproc-per-node 4 -- --epochs 3
#   ./launch_multinode_ddp.sh --local --nproc-per-node 1 -- --epochs 3
#
# Each host must let you in by ssh without a password and have this folder and Python at the same path (or --dir, --python).
# One that fails ends all; so do Ctrl-C and the death of this script.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch_multinode_ddp.sh (--hosts HOST,HOST... | --local) [options] [-- arguments of train_ddp.py]
  --hosts A,B           machines to run on; the first is where all meet
  --local               two nodes on this machine, to try it out
  --nproc-per-node N    workers on each (default: 1)
  --master-addr ADDR    the first host's address for the others (default: its name in --hosts)
  --master-port PORT    a free port there (default: 29500)
  --dir DIR             this folder's place on the hosts (default: the same as here)
  --python PATH         Python with torch on the hosts (default: the same as here)
TEXT
}
fail() { echo "launch_multinode_ddp.sh: $*" >&2; exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
hosts="" local_only="" nproc=1 master_addr="" port=29500 dir=$here python=$(command -v python || command -v python3 || true)
while (($#)); do
    case $1 in
        --local) local_only=yes; shift; continue ;;
        --help | -h) usage; exit 0 ;;
        --) shift; break ;;
        --hosts | --nproc-per-node | --master-addr | --master-port | --dir | --python)
            [[ $# -ge 2 && $2 != -- ]] || fail "$1 needs a value; see --help" ;;
        *) fail "unknown option $1; what train_ddp.py is to get stands after --; see --help" ;;
    esac
    case $1 in
        --hosts) hosts=$2 ;;
        --nproc-per-node) nproc=$2 ;;
        --master-addr) master_addr=$2 ;;
        --master-port) port=$2 ;;
        --dir) dir=$2 ;;
        --python) python=$2 ;;
    esac
    shift 2
done

[[ -n $local_only || -n $hosts ]] || fail "name the machines with --hosts node1,node2, or try it here with --local"
[[ -z $local_only || -z $hosts ]] || fail "--local and --hosts exclude each other"
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node is '$nproc'; a whole number, 1 or more, is needed"
[[ $port =~ ^[1-9][0-9]*$ && $port -le 65535 ]] || fail "--master-port is '$port'; a number from 1 to 65535 is needed"
[[ -n $python ]] || fail "no python here; name the one that has torch with --python"
if [[ -n $local_only ]]; then nodes=(local-0 local-1); else IFS=, read -ra nodes <<<"$hosts"; fi
for node in "${nodes[@]}"; do
    [[ -n $node && $node != -* ]] || fail "--hosts '$hosts' has an empty or odd name; write node1,node2"
done
if [[ -z $master_addr ]]; then
    if [[ -n $local_only ]]; then master_addr=127.0.0.1; else master_addr=${nodes[0]#*@}; fi
fi

on_node() { # NODE COMMAND: runs a line of bash there
    if [[ -n $local_only ]]; then
        exec bash -c "$2"
    else
        exec ssh -o BatchMode=yes -o ConnectTimeout=10 "$1" "bash -c $(printf %q "$2")"
    fi
}

# -- what would fail later is said now ---------------------------------------------------------------------------------
printf -v check 'test -f %q/train_ddp.py || exit 3; %q -c "import importlib.util as u, sys; sys.exit(4 * (u.find_spec(\\"torch\\") is None))"' "$dir" "$python"
printf -v check_port '%q -c "import socket; socket.create_server((\\"\\", %d)).close()" 2>/dev/null' "$python" "$port"
for node in "${nodes[@]}"; do
    code=0
    (on_node "$node" "$check") </dev/null || code=$?
    case $code in
        0) ;;
        3) fail "$node has no $dir/train_ddp.py: copy this folder there, or say where it is with --dir" ;;
        255) fail "$node does not let ssh in without a password: try 'ssh $node true', then ssh-copy-id" ;;
        *) fail "$node cannot run torch with $python (exit code $code): name its Python with --python" ;;
    esac
done
(on_node "${nodes[0]}" "$check_port") </dev/null ||
    fail "port $port of ${nodes[0]} is taken, or may not be used: give another --master-port"

# -- launch ------------------------------------------------------------------------------------------------------------
# Each node's command reads its standard input, on which nothing is ever written: when this script ends, however it does,
# the input ends, and the node stops its torchrun. ssh alone would leave it running.
scratch=$(mktemp -d)
mkfifo "$scratch/lifeline"
exec 9<>"$scratch/lifeline"

environment="" # what decides about data and network travels along
for name in $(compgen -e); do
    case $name in
        KEEPSTEP_DATA | PYTHONPATH | OMP_NUM_THREADS | NCCL_* | GLOO_*) environment+=$(printf 'export %s=%q; ' "$name" "${!name}") ;;
    esac
done

gpus=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores > nproc * ${#nodes[@]} ? cores / (nproc * ${#nodes[@]}) : 1))
node_command() { # NUMBER [ARGUMENT...]: what node NUMBER runs
    local number=$1 gpu_list="" words
    shift
    if [[ -n $local_only && $gpus -ge $((nproc * ${#nodes[@]})) ]]; then
        gpu_list=$(seq -s, $((number * nproc)) $((number * nproc + nproc - 1)))
    fi
    if [[ -n $local_only ]]; then # two nodes on one machine share its cores, and must not share a GPU
        printf 'export CUDA_VISIBLE_DEVICES=%s OMP_NUM_THREADS=%d; ' "$gpu_list" "$threads"
    fi
    printf -v words '%q ' "$python" -u -m torch.distributed.run --nnodes "${#nodes[@]}" --node-rank "$number" \
        --nproc-per-node "$nproc" --master-addr "$master_addr" --master-port "$port" train_ddp.py "$@"
    printf 'cd %q || exit 3; %s%s <&- & torchrun=$!; exec 3<&0; ' "$dir" "$environment" "$words"
    printf '{ cat <&3; kill $torchrun; } >/dev/null 2>&1 & lifeline=$!; wait $torchrun; code=$?; '
    printf 'kill $lifeline 2>/dev/null; exit $code'
}

pids=()
stop() { # ends every node, and waits for it
    exec 9>&-
    local waited=0
    while ((waited++ < 60)) && [[ -n $(jobs -rp) ]]; do sleep 0.5; done
    # shellcheck disable=SC2046
    [[ -z $(jobs -rp) ]] || kill -9 $(jobs -rp) 2>/dev/null || true
    rm -rf "$scratch"
}
trap stop EXIT
trap 'echo "launch_multinode_ddp.sh: stopping all nodes" >&2; exit 130' INT TERM HUP

for number in "${!nodes[@]}"; do
    node=${nodes[$number]}
    (on_node "$node" "$(node_command "$number" "$@")") <"$scratch/lifeline" 9>&- \
        > >(while IFS= read -r line; do printf '[%s] %s\n' "$node" "$line"; done) 2>&1 &
    pids+=($!)
done

running=("${!pids[@]}")
while ((${#running[@]})); do
    sleep 0.2
    left=()
    for number in "${running[@]}"; do
        if kill -0 "${pids[$number]}" 2>/dev/null; then
            left+=("$number")
            continue
        fi
        code=0
        wait "${pids[$number]}" || code=$?
        if ((code)); then
            echo "launch_multinode_ddp.sh: ${nodes[$number]} failed (exit code $code); stopping the others" >&2
            exit "$code"
        fi
    done
    running=(${left[@]+"${left[@]}"})
done
