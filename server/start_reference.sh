#!/usr/bin/env bash
# The reference server in the foreground; says when it is ready, or in one line why not.
#
#   bash server/start_reference.sh                                       one request at a time, port 8001
#   bash server/start_reference.sh --mode static --batch-size 8
#   bash server/start_reference.sh --dry-run                             only print the command
set -euo pipefail
name=reference
# shellcheck source=server/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'END'
usage: bash server/start_reference.sh [--model M] [--port P] [--max-model-len N] [--dtype D] [--cpu|--gpu] [--host H]
                                      [--timeout S] [--log FILE] [--dry-run] [anything else goes to python -m server]

  --model M           folder or hub name [default: the packaged SmolLM2-135M-Instruct]
  --port P            [default: 8001]
  --max-model-len N   prompt + answer, tokens [default: the model's]
  --dtype D           bfloat16, half (float16), float32 [default: as saved; half on a GPU without bfloat16]
  --cpu, --gpu        where to compute [default: the GPU if torch sees one]
  --host H            who may connect; 0.0.0.0: everyone who reaches this machine [default: 127.0.0.1]
  --timeout S         give up when it is not ready by then [default: 900]
  --log FILE          what the server says [default: runs/logs/reference-PORT.log]
  --dry-run           print the command and end

Of the rest: --mode serial|static|continuous, --batch-size N, --batch-wait-ms MS, --no-kv-cache, --compile; all of them:
python -m server --help. LOADGEN_PYTHON names another environment's Python. Ctrl-C or SIGTERM finishes what was accepted
(a second one does not wait) and stops, status 0; else status 1.
END
}

port=8001
parse_flags "$@"
pick_python
resolve_model

settings=("PYTHONPATH=$clone${PYTHONPATH:+:$PYTHONPATH}")
command=("$python" -m server --model "$model" --host "$host" --port "$port")
[[ ! -d $model ]] || settings+=(HF_HUB_OFFLINE=1)
[[ -z $served_name ]] || command+=(--served-model-name "$served_name")
case $device in
    cpu) command+=(--device cpu) ;;
    gpu) command+=(--device cuda) ;;
esac
if [[ $device != cpu ]] && find_gpu; then
    settings+=("PATH=$PATH")
    [[ -z ${LD_LIBRARY_PATH-} ]] || settings+=("LD_LIBRARY_PATH=$LD_LIBRARY_PATH")
    if [[ -z $dtype && -n $gpu_capability ]] && ! version_at_least "$gpu_capability" 8.0; then
        dtype=float16
    fi
elif [[ $device == gpu ]]; then
    [[ -n $dry_run ]] || fail "--gpu, but no GPU answers (${gpu_error:-no nvidia-smi}): bash setup.sh check tells why"
fi
[[ -z $max_model_len ]] || command+=(--max-model-len "$max_model_len")
case $dtype in
    "") ;;
    half) command+=(--dtype float16) ;; # vLLM's word for it
    *) command+=(--dtype "$dtype") ;;
esac
command+=("${rest[@]}")
run_server 65
