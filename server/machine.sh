# shellcheck shell=bash disable=SC2034  # the variables are for those who source this
# What this machine is and has: memory, ports, GPU, WSL. Sourced by the start scripts and by setup.sh; prints nothing by
# itself, changes nothing but PATH and LD_LIBRARY_PATH, and those only in find_gpu.
#
# LOADGEN_ROOT puts another folder before /proc, /sys, /etc, /usr/lib/wsl and /mnt: the tests make machines up there.
ROOT=${LOADGEN_ROOT-}

# native, wsl1, wsl2 or container-on-wsl2 would all say Linux in uname -s. The whole release text decides: WSL 1 says
# "4.4.0-NNNNN-Microsoft", WSL 2 "5.15.x-microsoft-standard-WSL2"; a self-built WSL 2 kernel may say neither, but has
# the interop folder and a kernel of its own (5.x or 6.x), which WSL 1 never had.
system_kind() {
    local release=""
    [[ -r $ROOT/proc/version ]] && read -r release <"$ROOT/proc/version"
    local lower=${release,,}
    if [[ $lower == *microsoft-standard* || $lower == *wsl2* ]]; then
        echo wsl2
    elif [[ $lower =~ linux\ version\ 4\.4\.0-[0-9]+-microsoft ]]; then
        echo wsl1
    elif [[ $lower == *microsoft* && -d $ROOT/run/WSL ]]; then
        echo wsl2
    elif [[ -e $ROOT/proc/sys/fs/binfmt_misc/WSLInterop && -d $ROOT/run/WSL ]]; then
        echo wsl2
    else
        echo native
    fi
}

# The kernel's version number, such as 5.15.153.1
kernel_version() {
    [[ $(cat "$ROOT/proc/version" 2>/dev/null) =~ [Ll]inux\ version\ ([0-9]+(\.[0-9]+)+) ]] && echo "${BASH_REMATCH[1]}"
}

# version_at_least 5.15.153.1 5.10.43.3
version_at_least() {
    local have want i
    IFS=. read -ra have <<<"$1"
    IFS=. read -ra want <<<"$2"
    for i in "${!want[@]}"; do
        ((10#${have[i]:-0} > 10#${want[i]})) && return 0
        ((10#${have[i]:-0} < 10#${want[i]})) && return 1
    done
    return 0
}

# 31129 MiB as 30.4
gib() { awk -v mib="$1" 'BEGIN { printf "%.1f", mib / 1024 }'; }

meminfo_mib() { awk -v key="$1:" '$1 == key { print int($2 / 1024) }' "$ROOT/proc/meminfo" 2>/dev/null; }

# The memory limit of this container in MiB, or nothing.
memory_limit_mib() {
    local file bytes
    for file in "$ROOT/sys/fs/cgroup/memory.max" "$ROOT/sys/fs/cgroup/memory/memory.limit_in_bytes"; do
        [[ -r $file ]] || continue
        read -r bytes <"$file"
        # version 1 says "no limit" as a number near 2^63
        [[ $bytes =~ ^[0-9]{1,15}$ ]] && echo $((bytes >> 20))
        return
    done
}

# What a new process may still take, in MiB: of the machine, or of the container's limit where that is nearer.
available_mib() {
    local free limit used=0 file
    free=$(meminfo_mib MemAvailable)
    limit=$(memory_limit_mib)
    if [[ -n $limit ]]; then
        for file in "$ROOT/sys/fs/cgroup/memory.current" "$ROOT/sys/fs/cgroup/memory/memory.usage_in_bytes"; do
            [[ -r $file ]] && read -r used <"$file" && break
        done
        limit=$((limit - (used >> 20)))
        ((limit < ${free:-limit})) && free=$limit
    fi
    echo "${free:-0}"
}

# How often the kernel has ended a process for want of memory since it started, in this container or the machine.
num_oom_kills() { awk '$1 == "oom_kill" { print $2; found = 1; exit } END { if (!found) print 0 }' "$ROOT/proc/vmstat" 2>/dev/null || echo 0; }

# Where the loader finds a library, one path a line; nothing: it does not.
library_paths() {
    PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | awk -v name="$1" '$1 == name { print $NF }'
}

# Someone answers on ADDRESS PORT.
port_answers() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# " (python3, process 4711)" of who listens on a port, if that can be seen.
port_holder() {
    local line
    line=$(ss -ltnpH "sport = :$1" 2>/dev/null | head -n 1) || true
    [[ $line =~ \"([^\"]+)\",pid=([0-9]+) ]] && echo " (${BASH_REMATCH[1]}, process ${BASH_REMATCH[2]})"
    return 0
}

# find_gpu: look at the first GPU through nvidia-smi, which under WSL is in /usr/lib/wsl/lib and on no PATH of a
# service or of sudo. Status 1: none answers. Sets
#   smi             the nvidia-smi that answers
#   gpu_name        NVIDIA GeForce RTX 4090
#   gpu_total_mib   gpu_free_mib   gpu_capability (8.9)   gpu_driver (560.94)   gpu_cuda (12.6); empty where not told
#   gpu_error       what nvidia-smi said instead of an answer
find_gpu() {
    local wsl=$ROOT/usr/lib/wsl/lib line table
    smi="" gpu_name="" gpu_total_mib="" gpu_free_mib="" gpu_capability="" gpu_driver="" gpu_cuda="" gpu_error=""
    if [[ -d $wsl ]]; then
        [[ :$PATH: == *":$wsl:"* ]] || PATH=$PATH:$wsl
        [[ :${LD_LIBRARY_PATH-}: == *":$wsl:"* ]] || LD_LIBRARY_PATH=$wsl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        export PATH LD_LIBRARY_PATH
    fi
    smi=$(type -P nvidia-smi) || return 1
    # A driver that hangs (after an update of Windows, say) must not hang us.
    if ! table=$(timeout 20 "$smi" 2>&1); then
        gpu_error=$(head -n 1 <<<"$table")
        [[ -n $gpu_error ]] || gpu_error="no answer within 20 s"
        return 1
    fi
    [[ $table =~ Driver\ Version:\ *([0-9.]+) ]] && gpu_driver=${BASH_REMATCH[1]}
    [[ $table =~ CUDA[A-Za-z\ ]*\ Version:\ *([0-9.]+) ]] && gpu_cuda=${BASH_REMATCH[1]}
    [[ $table =~ ([0-9]+)MiB\ */\ *([0-9]+)MiB ]] &&
        gpu_total_mib=${BASH_REMATCH[2]} gpu_free_mib=$((BASH_REMATCH[2] - BASH_REMATCH[1]))
    local fields=name,memory.total,memory.free,driver_version,compute_cap
    line=$(timeout 20 "$smi" --query-gpu=$fields --format=csv,noheader,nounits 2>/dev/null | head -n 1) || true
    if [[ $line =~ ^(.+),\ *([0-9]+),\ *([0-9]+),\ *([0-9.]+),\ *([0-9]+\.[0-9]+)$ ]]; then
        gpu_name=${BASH_REMATCH[1]} gpu_total_mib=${BASH_REMATCH[2]} gpu_free_mib=${BASH_REMATCH[3]}
        gpu_driver=${BASH_REMATCH[4]} gpu_capability=${BASH_REMATCH[5]}
    fi
    [[ -n $gpu_name$gpu_driver$gpu_total_mib ]] && return 0
    gpu_error=$(head -n 1 <<<"$table")
    return 1
}

# The largest --gpu-memory-utilization (two decimals, never rounded up) that what is free allows:
# vLLM takes that share of the total, and refuses to start when less than it is free.
highest_utilization() {
    awk -v free="$1" -v total="$2" 'BEGIN { u = int(100 * free / total + 1e-9) / 100; printf "%.2f", (u > 0 ? u : 0) }'
}
