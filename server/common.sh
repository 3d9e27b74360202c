# shellcheck shell=bash
# Shared by start_vllm.sh and start_reference.sh: flags, the environment's Python, and a server in the foreground that
# says when it is ready, why it failed, and leaves no process behind. The script that sources this sets name (of the
# server, before every line), command and settings.
# shellcheck disable=SC2034,SC2154  # variables cross between the files
clone=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=server/machine.sh
source "$clone/server/machine.sh"

say() { echo "$name: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

# ---------------------------------------------------------------- flags

model="" port="" max_model_len="" dtype="" device=auto dry_run="" timeout_s=900 log="" host=127.0.0.1 served_name=""
rest=() # for the server, as given

parse_flags() {
    while (($#)); do
        case $1 in
            --model=* | --port=* | --max-model-len=* | --dtype=* | --timeout=* | --log=* | --host=* | --served-model-name=*)
                set -- "${1%%=*}" "${1#*=}" "${@:2}"
                ;;
        esac
        case $1 in
            --cpu | --gpu) device=${1#--} ;;
            --dry-run) dry_run=1 ;;
            -h | --help) usage; exit 0 ;;
            --model | --port | --max-model-len | --dtype | --timeout | --log | --host | --served-model-name)
                [[ -n ${2-} ]] || fail "$1 needs a value (see --help)"
                case $1 in
                    --model) model=$2 ;;
                    --port) port=$2 ;;
                    --max-model-len) max_model_len=$2 ;;
                    --dtype) dtype=$2 ;;
                    --timeout) timeout_s=$2 ;;
                    --log) log=$2 ;;
                    --host) host=$2 ;;
                    --served-model-name) served_name=$2 ;;
                esac
                shift
                ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
    if ! [[ $port =~ ^[0-9]{1,5}$ ]] || ((10#$port < 1 || 10#$port > 65535)); then
        fail "--port: a whole number from 1 to 65535, got '$port'"
    fi
    if ! [[ $timeout_s =~ ^[0-9]{1,6}$ ]] || ((10#$timeout_s < 1)); then
        fail "--timeout: whole seconds, at least 1, got '$timeout_s'"
    fi
    port=$((10#$port)) timeout_s=$((10#$timeout_s))
    # 0.0.0.0 and :: are for others to reach; we ask on loopback
    address=127.0.0.1
    [[ $host =~ ^(0\.0\.0\.0|::|127\.0\.0\.1|localhost)$ ]] || address=$host
    log=${log:-$clone/runs/logs/$name-$port.log}
}

pick_python() {
    python=${LOADGEN_PYTHON-}
    if [[ -z $python ]]; then
        python=$clone/.venv/bin/python
        [[ -x $python ]] || python=python3
    fi
    type -P "$python" >/dev/null || fail "no Python at '$python': bash setup.sh makes the environment"
}

# The model's folder, absolute, or its name on the hub. Without --model: the packaged one, made on first use.
resolve_model() {
    local code='from server.packaged_model import DEFAULT; print(DEFAULT)'
    if [[ -z $model ]]; then
        if [[ -n $dry_run ]]; then
            model=$(cd "$clone" && "$python" -c "$code") || fail "cannot name the packaged model: bash setup.sh"
        else
            model=$(cd "$clone" && "$python" -m server.packaged_model) ||
                fail "the packaged model is not there: bash setup.sh, or --model FOLDER_OR_NAME"
        fi
    elif [[ -d $model ]]; then
        model=$(cd "$model" && pwd)
        [[ -f $model/config.json || -f $model/params.json ]] ||
            fail "model not found: no config.json in $model: --model FOLDER_OR_NAME"
    elif [[ $model == [/.~]* && ! -e $model ]]; then
        fail "model not found: no folder $model: --model FOLDER_OR_NAME"
    fi
}

# ---------------------------------------------------------------- a server in the foreground

# Run "${command[@]}" with the variables of "${settings[@]}" (NAME=VALUE) until a signal.
# Status 0: stopped by INT, TERM or HUP. 1: it did not start or ended by itself; one line says why.
run_server() {
    local line grace_s=$1 begin=$SECONDS last_told=$SECONDS status=0
    line=$(printf '%q ' "${settings[@]}" "${command[@]}")
    if [[ -n $dry_run ]]; then
        echo "${line% }"
        return 0
    fi
    port_answers "$address" "$port" &&
        fail "port $port is in use$(port_holder "$port"): stop what runs there, or --port with another number"
    { mkdir -p "$(dirname "$log")" && : >"$log"; } 2>/dev/null || fail "cannot write the log $log: --log FILE"
    log=$(cd "$(dirname "$log")" && pwd)/$(basename "$log")
    say "${line% }"

    # A session, and so a process group, of its own: Ctrl-C reaches only us, and we can end all of it. If we are killed
    # outright, the kernel tells the server.
    local before=(setsid)
    setpriv --pdeathsig TERM true 2>/dev/null && before+=(setpriv --pdeathsig TERM)
    num_oom_kills_before=$(num_oom_kills)
    stop_signal="" server_pid=""
    # passed on at once: a signal between the test of stop_signal and `wait` would else wait for ever
    trap 'stop_signal=1; [[ -z $server_pid ]] || kill -TERM "$server_pid" 2>/dev/null' INT TERM HUP
    "${before[@]}" env "${settings[@]}" "${command[@]}" >"$log" 2>&1 </dev/null &
    server_pid=$!
    trap 'end_group' EXIT

    until healthy; do
        [[ -z $stop_signal ]] || stop_server "$grace_s"
        if ! kill -0 "$server_pid" 2>/dev/null; then
            [[ -z $stop_signal ]] || stop_server "$grace_s"
            wait "$server_pid" || status=$?
            end_group
            fail "$(reason $status) (log: $log)"
        fi
        if ((SECONDS - begin >= timeout_s)); then
            line=$(last_line) || true
            end_group
            fail "not ready within $timeout_s s: --timeout with more seconds, or see where it stands: ${line:-it said nothing} (log: $log)"
        fi
        if [[ -t 2 ]]; then
            printf '\r%s: %d s: %.100s\033[K' "$name" $((SECONDS - begin)) "$(last_line)" >&2
        elif ((SECONDS - last_told >= 5)); then
            last_told=$SECONDS
            line=$(last_line | cut -c -100) || true
            say "$((SECONDS - begin)) s: ${line:-nothing said yet}"
        fi
        pause 0.5
    done
    [[ -t 2 ]] && printf '\r\033[K' >&2
    echo "ready: http://$address:$port (log: $log)"

    while [[ -z $stop_signal ]]; do
        status=0
        wait "$server_pid" || status=$?
        [[ -n $stop_signal ]] && break
        end_group
        fail "ended by itself after $((SECONDS - begin)) s: $(reason $status) (log: $log)"
    done
    stop_server "$grace_s"
}

# GET /health says 200. Not curl: it may be missing, and it asks a proxy that the environment names.
healthy() (
    exec 3<>"/dev/tcp/$address/$port" || exit 1
    printf 'GET /health HTTP/1.0\r\nHost: %s\r\n\r\n' "$address" >&3
    read -r -t 5 status_line <&3
    [[ $status_line == HTTP/1.[01]' 200'* ]]
) 2>/dev/null

# sleep that a trapped signal ends
pause() {
    local nap
    sleep "$1" &
    nap=$!
    wait $nap || kill $nap 2>/dev/null || true
}

# The server has been asked to end: wait, end what is left of its group, and exit 0. A second signal does not wait.
stop_server() {
    local deadline=$((SECONDS + $1))
    [[ -t 2 ]] && printf '\r\033[K' >&2
    say "stopping"
    stop_signal=""
    while kill -0 "$server_pid" 2>/dev/null && ((SECONDS < deadline)) && [[ -z $stop_signal ]]; do
        pause 0.2
    done
    end_group
    exit 0
}

# No process of the server's group outlives us: an engine process that does keeps its GPU memory.
end_group() {
    trap - EXIT
    kill -TERM -- "-$server_pid" 2>/dev/null || kill -TERM "$server_pid" 2>/dev/null || return 0
    group_is_gone 10 && return
    kill -KILL -- "-$server_pid" 2>/dev/null || true
    group_is_gone 20 || true
}

# group_is_gone N: within N tenths of a second. What has ended and waits for its parent to notice, is gone.
group_is_gone() {
    local _
    for ((_ = 0; _ < $1; _++)); do
        { cat /proc/[0-9]*/stat 2>/dev/null || true; } |
            awk -v group="$server_pid" '{ sub(/.*\) /, "") } $3 == group && $1 != "Z" { alive = 1 } END { exit alive }' &&
            return 0
        pause 0.1
    done
    return 1
}

plain_log() { sed 's/\x1b\[[0-9;]*[A-Za-z]//g; s/\r/\n/g' "$log" | tr -d '\000'; }

last_line() { tail -c 4000 "$log" | sed 's/\x1b\[[0-9;]*[A-Za-z]//g; s/\r/\n/g' | grep -v '^[[:space:]]*$' | tail -n 1; }

# ---------------------------------------------------------------- why it failed

# What is in the log is told apart by the words of vLLM, torch, CUDA and transformers; the first that fits, wins.
# One a line: pattern (extended, any case) => what happened: what to do. With =>> the log's own words follow: they hold
# the numbers.
FAILURES='
driver version is insufficient|NVIDIA driver .*too old|forward compatibility was attempted => the NVIDIA driver is too old for this build: update the driver on Windows (under WSL) or of this Linux, or --cpu after bash setup.sh --cpu
no kernel image is available|PTX was compiled with an unsupported|not compatible with the current PyTorch => this GPU is too old for this build: --cpu after bash setup.sh --cpu
Bfloat16 is only supported on GPUs => this GPU has no bfloat16: --dtype half
libcuda\.so.*cannot open shared object|Found no NVIDIA driver|no CUDA-capable device|CUDA unknown error => no GPU driver reachable: bash setup.sh check tells which part is missing
Free memory on device .*less than desired GPU memory util =>> out of VRAM: less is free than --gpu-memory-utilization asks for: a lower one, or close what uses the GPU (nvidia-smi lists it)
max seq len .*KV cache is needed|No available memory for the cache blocks =>> out of memory for the KV cache: a lower --max-model-len, a higher --gpu-memory-utilization (on CPU: VLLM_CPU_KVCACHE_SPACE), or a smaller model
CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED => out of VRAM: a lower --max-model-len or --max-num-seqs, or a smaller or quantised model
Available memory on node .*less than|DefaultCPUAllocator: .*allocate memory|Cannot allocate memory|^MemoryError|[^a-z]MemoryError =>> out of memory: a smaller VLLM_CPU_KVCACHE_SPACE or model, or more memory for WSL (memory= in .wslconfig)
Address already in use|error while attempting to bind|cannot listen on => the port is in use: --port with another number
GatedRepoError|gated repo|401 Client Error => the hub refuses this model without permission: accept its licence there and set HF_TOKEN, or --model FOLDER
not a valid model identifier|is not a local folder|Invalid repository ID|Repo id must|RepositoryNotFoundError|LocalEntryNotFound|couldn.t connect to|Incorrect path_or_model_id|cannot find the requested files|Can.t load the configuration|no model at|OfflineModeIsEnabled => model not found: --model with a folder, or with a name that the hub has and this machine reaches
is greater than the derived max_model_len|longer than the model =>> --max-model-len is beyond what the model was made for: a lower one
Model architectures .*not supported|does not recognize this architecture => this model is not one that this version serves: another --model
libnuma\.so.*cannot open shared object => libnuma is missing, which vLLM on the CPU needs: bash setup.sh brings it, or sudo apt install libnuma1
No space left on device => the disk is full: free some, or move the cache (HF_HOME)
Failed to find C compiler|InvalidCxxCompiler|No working C\+\+ compiler => no C compiler: sudo apt install build-essential, or --enforce-eager
Python\.h: No such file => no headers of Python: sudo apt install python3-dev, or --enforce-eager
operator torchvision::nms does not exist => torchvision does not fit torch: bash setup.sh repairs it
No module named .?(vllm|server|torch|transformers) => not installed: bash setup.sh
'

# reason STATUS: one line. The exit status tells only what no log can.
reason() {
    local status=$1 pattern advice line text said
    text=$(plain_log)
    while IFS= read -r line; do
        [[ $line == *' =>'*' '* ]] || continue
        pattern=${line%% =>*} advice=${line#* =>}
        said=$(grep -m 1 -oiE -- "($pattern).{0,110}" <<<"$text" | head -n 1) || true
        [[ -n $said ]] || continue
        if [[ $advice == '>'* ]]; then echo "${advice#> }; it said: ${said}"; else echo "${advice# }"; fi
        return
    done <<<"$FAILURES"
    said=$(grep -v WARNING <<<"$text" | grep -E "\) ERROR |[A-Za-z]+Error: [^E]") || true
    if ((status == 137)) || (($(num_oom_kills) > num_oom_kills_before)) ||
        grep -qE "exit code: -9|: -9[,}]|SIGKILL" <<<"$text" ||
        # vLLM points at a cause above, and there is none: its engine process vanished without a word
        { grep -qF "Engine core initialization failed" <<<"$text" &&
            [[ -z $said ]]; }; then
        echo "killed, as the kernel does when memory runs out ($(gib "$(available_mib)") GiB are free now): a smaller model or VLLM_CPU_KVCACHE_SPACE, or more memory for WSL (memory= in .wslconfig)"
        return
    fi
    if ((status == 132)) || grep -qE "exit code: -4|: -4[,}]|Illegal instruction" <<<"$text"; then
        echo "this CPU lacks an instruction that the build needs: vLLM on CPU wants AVX2, better AVX-512; another machine"
        return
    fi
    # else its own last word; vLLM's very last one only points at the one before
    line=$(grep -v WARNING <<<"$text" | grep -E '(^|[] ])([A-Za-z_.]*(Error|Exception|error)|server): ' |
        grep -vE 'Engine core init|listening on|server: ready' | tail -n 1) || true
    line=${line:-$(grep -v warn <<<"$text" | tail -n 1)}
    echo "status $status: $(cut -c -300 <<<"${line:-it said nothing}")"
}
