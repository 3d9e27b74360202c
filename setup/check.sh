# shellcheck shell=bash disable=SC2154  # flags come from setup.sh, facts from server/machine.sh
# setup.sh check: what of this machine fits and what does not. Changes nothing.
#
# Each finding: ok, warning or stop; a name; one line of what; one line of what to do about it (none when ok).
# As JSON ("loadgen.check/1"): {format, ok, findings: [{level, name, what, todo}]}, todo null when there is none.

# The wheels that setup/install.sh pins are built for CUDA 13.0, whose first driver is 580, and for GPUs from Turing on.
CUDA_NEEDED=13.0
DRIVER_NEEDED=580
CAPABILITY_NEEDED=7.5
# What an environment takes on the disk, and while it is unpacked.
DISK_CPU_GIB=6
DISK_GPU_GIB=15

finding_levels=() finding_names=() finding_whats=() finding_todos=()

found() { # LEVEL NAME WHAT [TODO]
    finding_levels+=("$1") finding_names+=("$2") finding_whats+=("$3") finding_todos+=("${4-}")
}

run_check() {
    set +e # a probe that fails is no reason not to look at the rest
    check_all
    local i stops=0 warnings=0
    for i in "${!finding_levels[@]}"; do
        [[ ${finding_levels[i]} != stop ]] || stops=$((stops + 1))
        [[ ${finding_levels[i]} != warning ]] || warnings=$((warnings + 1))
    done
    if [[ -n $json ]]; then
        findings_as_json "$stops"
    else
        for i in "${!finding_levels[@]}"; do
            printf '%-8s %-12s %s\n' "${finding_levels[i]}" "${finding_names[i]}" "${finding_whats[i]}"
            [[ -z ${finding_todos[i]} ]] || printf '%-8s %-12s -> %s\n' "" "" "${finding_todos[i]}"
        done
        echo "$stops to stop for, $warnings warnings, $((${#finding_levels[@]} - stops - warnings)) ok"
    fi
    ((stops == 0))
}

check_all() {
    check_system
    # Windows' own shells have none of what follows.
    [[ $system != windows ]] || return 0
    check_processor
    check_gpu
    check_memory
    check_model
    check_disk
    check_folders
    check_open_files
    check_python
    check_compiler
    check_libnuma
    check_environment
    check_port
}

findings_as_json() {
    local i separator="" todo
    printf '{"format": "loadgen.check/1", "ok": %s, "findings": [' "$( (($1)) && echo false || echo true)"
    for i in "${!finding_levels[@]}"; do
        todo=null
        [[ -z ${finding_todos[i]} ]] || todo=$(json_string "${finding_todos[i]}")
        printf '%s\n  {"level": "%s", "name": "%s", "what": %s, "todo": %s}' "$separator" \
            "${finding_levels[i]}" "${finding_names[i]}" "$(json_string "${finding_whats[i]}")" "$todo"
        separator=,
    done
    printf '\n]}\n'
}

json_string() {
    local text=$1
    text=${text//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "${text//[[:cntrl:]]/ }"
}

# ---------------------------------------------------------------- the system

check_system() {
    local kernel distribution="" build=""
    system=$(system_kind)
    case $(uname -s) in
        MINGW* | MSYS* | CYGWIN*)
            system=windows
            found stop system "this is a shell of Windows itself" "open Ubuntu from the start menu (or run: wsl) and start again there; none yet: wsl --install"
            return
            ;;
        Linux) ;;
        *) found stop system "$(uname -s) is not Linux" "use Linux or WSL 2; the load generator alone runs here: pip install ." ;;
    esac
    kernel=$(kernel_version) || kernel=unknown
    [[ -r $ROOT/etc/os-release ]] && distribution=$(sed -n 's/^PRETTY_NAME="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$ROOT/etc/os-release")
    case $system in
        wsl1)
            found stop system "WSL 1 (kernel $kernel): no Linux kernel of its own, no GPU" \
                "convert to WSL 2, in PowerShell: wsl --set-version ${WSL_DISTRO_NAME:-Ubuntu} 2"
            ;;
        wsl2)
            build=$(windows_build)
            found ok system "WSL 2, kernel $kernel${distribution:+, $distribution}${build:+, Windows build $build}"
            if [[ $kernel != unknown ]] && ! version_at_least "$kernel" 5.10.43.3; then
                found warning kernel "kernel $kernel is too old for CUDA (5.10.43.3 or newer needed)" "in PowerShell: wsl --update, then wsl --shutdown"
            fi
            # 19044 is Windows 10 21H2, the first with CUDA in WSL 2
            if [[ -n $build ]] && ((build < 19044)); then
                found warning windows "Windows build $build has no CUDA in WSL (19044 or newer needed)" "Windows Update, or --cpu"
            fi
            ;;
        *) found ok system "Linux, kernel $kernel${distribution:+, $distribution}" ;;
    esac
    if [[ -e $ROOT/.dockerenv || -e $ROOT/run/.containerenv ]]; then
        found ok container "inside a container: its limits count, not the machine's"
    fi
}

# The build number of Windows (22631), if it says so. Starting a program of Windows can hang when interop is broken.
windows_build() {
    local cmd=$ROOT/mnt/c/Windows/System32/cmd.exe text
    [[ -x $cmd ]] || return 0
    text=$(cd / && timeout 10 "$cmd" /c ver 2>/dev/null </dev/null | tr -d '\r') || return 0
    [[ $text =~ 10\.0\.([0-9]+) ]] && echo "${BASH_REMATCH[1]}"
    return 0
}

check_processor() {
    local machine flags
    machine=$(uname -m)
    case $machine in
        x86_64 | aarch64) ;;
        *) found stop processor "$machine: there are no wheels of torch and vLLM for it" "a 64-bit x86 or ARM machine" && return ;;
    esac
    if [[ $machine == x86_64 && -r $ROOT/proc/cpuinfo ]]; then
        flags=" $(sed -n '/^flags/{s/.*://p;q}' "$ROOT/proc/cpuinfo") "
        if [[ $flags != *" avx2 "* ]]; then
            found warning processor "no AVX2: vLLM on the CPU does not run here" "a GPU, or another machine"
            return
        elif [[ $flags != *" avx512f "* ]]; then
            found ok processor "$machine with AVX2; vLLM on the CPU is faster with AVX-512"
            return
        fi
    fi
    found ok processor "$machine"
}

# ---------------------------------------------------------------- the GPU

# Under WSL the driver is Windows': a Linux display driver must never be installed there, it hides that one.
driver_advice() {
    case $system in
        wsl2) echo "install the newest NVIDIA driver on Windows, then wsl --shutdown; never a Linux display driver inside WSL" ;;
        *) echo "install NVIDIA's driver $DRIVER_NEEDED or newer for this Linux (Ubuntu: sudo ubuntu-drivers install), then reboot" ;;
    esac
}

# level of what keeps the GPU from being used: --gpu insists, else the CPU does
gpu_level() { [[ $device == gpu ]] && echo stop || echo warning; }

check_gpu() {
    local highest need libraries
    if [[ $device == cpu ]]; then
        found ok gpu "not wanted (--cpu)"
        return
    fi
    if ! find_gpu; then
        check_no_gpu
        return
    fi
    found ok gpu "${gpu_name:-NVIDIA GPU}, driver ${gpu_driver:-unknown}, CUDA ${gpu_cuda:-unknown} ($smi)"

    libraries=$(library_paths libcuda.so.1)
    if [[ $system == wsl2 ]]; then
        if grep -qv '/usr/lib/wsl/' <<<"$libraries" && [[ -n $libraries ]]; then
            found warning libcuda "a libcuda of a Linux driver hides Windows' own: $(grep -v '/usr/lib/wsl/' <<<"$libraries" | head -n 1)" \
                "remove it: sudo apt purge 'libnvidia-compute-*' 'nvidia-driver-*'; Windows' driver is enough"
        elif [[ -e $ROOT/usr/lib/wsl/lib/libcuda.so.1 || -n $libraries ]]; then
            found ok libcuda "in /usr/lib/wsl/lib; the start scripts put it into the servers' LD_LIBRARY_PATH"
        else
            found "$(gpu_level)" libcuda "no libcuda.so.1 in /usr/lib/wsl/lib" "$(driver_advice)"
        fi
        found ok pinned "vLLM does without pinned memory under WSL and may warn of it: expected, not an error"
    elif [[ -z $libraries ]]; then
        found "$(gpu_level)" libcuda "no libcuda.so.1 where the loader looks (ldconfig -p)" \
            "sudo ldconfig; in a container: start it with --gpus all"
    fi

    if [[ -n $gpu_cuda ]] && ! version_at_least "$gpu_cuda" "$CUDA_NEEDED" ||
        [[ -z $gpu_cuda && -n $gpu_driver ]] && ! version_at_least "$gpu_driver" "$DRIVER_NEEDED"; then
        found "$(gpu_level)" driver "driver ${gpu_driver:-unknown} knows CUDA ${gpu_cuda:-unknown}, the wheels need $CUDA_NEEDED (driver $DRIVER_NEEDED)" "$(driver_advice); or --cpu"
    fi
    if [[ -n $gpu_capability ]]; then
        if ! version_at_least "$gpu_capability" "$CAPABILITY_NEEDED"; then
            found "$(gpu_level)" capability "compute capability $gpu_capability: the wheels need $CAPABILITY_NEEDED (Turing) or more" "--cpu, or a newer GPU"
        elif ! version_at_least "$gpu_capability" 8.0; then
            found ok capability "compute capability $gpu_capability has no bfloat16: the start scripts take --dtype half"
        else
            found ok capability "compute capability $gpu_capability has bfloat16"
        fi
    fi
    [[ -n $gpu_free_mib ]] || return 0
    need=$(awk -v u="$utilization" -v t="$gpu_total_mib" 'BEGIN { printf "%d", u * t }')
    highest=$(highest_utilization "$gpu_free_mib" "$gpu_total_mib")
    if ((need > gpu_free_mib)); then
        found warning vram "utilization $utilization needs $(gib2 "$need") GiB, but $(gib2 "$gpu_free_mib") of $(gib2 "$gpu_total_mib") are free" \
            "--gpu-memory-utilization $highest at most, or close what uses the GPU (Windows' desktop, browsers, games)"
    else
        found ok vram "$(gib2 "$gpu_free_mib") of $(gib2 "$gpu_total_mib") GiB free, utilization $utilization needs $(gib2 "$need")"
    fi
}

gib2() { awk -v mib="$1" 'BEGIN { printf "%.2f", mib / 1024 }'; }

check_no_gpu() {
    local vendors
    vendors=$(cat "$ROOT"/sys/bus/pci/devices/*/vendor 2>/dev/null) || true
    if [[ -n $gpu_error && $gpu_error == *"ersion mismatch"* ]]; then
        found "$(gpu_level)" gpu "nvidia-smi: $gpu_error" \
            "the driver was updated under a running system: $([[ $system == wsl2 ]] && echo 'wsl --shutdown' || echo reboot)"
    elif [[ -n $gpu_error ]]; then
        found "$(gpu_level)" gpu "nvidia-smi finds no usable GPU: $gpu_error" "$(driver_advice); until then: --cpu"
    elif [[ $system == wsl2 && -e $ROOT/dev/dxg ]]; then
        found "$(gpu_level)" gpu "the GPU bridge is there (/dev/dxg), but no nvidia-smi on PATH or in /usr/lib/wsl/lib" \
            "with an NVIDIA GPU: $(driver_advice); else --cpu"
    elif [[ $system == wsl2 ]]; then
        found "$(gpu_level)" gpu "no GPU bridge (/dev/dxg): no GPU, or Windows, its driver or WSL is too old for it" \
            "with an NVIDIA GPU: newest driver on Windows, wsl --update, wsl --shutdown; else --cpu"
    elif [[ $vendors == *0x10de* ]]; then
        found "$(gpu_level)" gpu "an NVIDIA card without its driver" "$(driver_advice)"
    elif [[ $device == gpu ]]; then
        found stop gpu "--gpu, but there is no NVIDIA GPU" "--cpu"
    else
        found ok gpu "no NVIDIA GPU: vLLM runs on the CPU"
    fi
}

# ---------------------------------------------------------------- memory

check_memory() {
    local total free limit swap
    total=$(meminfo_mib MemTotal)
    free=$(available_mib)
    limit=$(memory_limit_mib)
    swap=$(meminfo_mib SwapTotal)
    if [[ -z $total ]]; then
        found warning memory "cannot read /proc/meminfo" "mount /proc"
        return
    fi
    if [[ -n $limit ]] && ((limit < total)); then
        found ok memory-limit "this container may use $((limit / 1024)) of $((total / 1024)) GiB"
        total=$limit
    fi
    local more="close other programs"
    [[ $system != wsl2 ]] || more="more for WSL: memory= under [wsl2] in %UserProfile%\\.wslconfig on Windows, then wsl --shutdown"
    # the smallest model in vLLM on the CPU takes about 3 GiB, and its cache 1
    if ((total < 3072)); then
        found stop memory "$((total / 1024)) GiB in all, 4 are the least" "$more"
    elif ((free < 4096)); then
        found warning memory "$(gib "$free") of $((total / 1024)) GiB free: what loads may be killed" "$more"
    else
        found ok memory "$((free / 1024)) of $((total / 1024)) GiB free"
    fi
    if ((${swap:-0} == 0 && total < 16384)); then
        found warning swap "no swap, $((total / 1024)) GiB of memory: a peak while loading is killed at once" \
            "$([[ $system == wsl2 ]] && echo "swap=8GB under [wsl2] in .wslconfig, then wsl --shutdown" || echo "add a swap file of 8 GiB")"
    fi
    [[ $system == wsl2 || -n ${LOADGEN_WSLCONFIG-} ]] && check_wslconfig "$total"
    return 0
}

# .wslconfig, which Windows reads without ever complaining. LOADGEN_WSLCONFIG names one; else every user's.
check_wslconfig() {
    local total=$1 file files=() wished
    if [[ -n ${LOADGEN_WSLCONFIG-} ]]; then
        files=("$LOADGEN_WSLCONFIG")
    else
        for file in "$ROOT"/mnt/c/Users/*/.wslconfig; do [[ -r $file ]] && files+=("$file"); done
    fi
    for file in "$ROOT"/mnt/c/Users/*/.wslconfig.txt; do
        [[ -e $file ]] && found warning wslconfig "${file#"$ROOT"}: Windows reads only a file named .wslconfig" "rename it: Explorer hides the .txt"
    done
    for file in "$HOME/.wslconfig" "$ROOT/etc/.wslconfig"; do
        [[ -e $file && ! $HOME =~ ^/mnt/[a-z]/ ]] && found warning wslconfig "$file is inside Linux, where nothing reads it" "move it to %UserProfile% on Windows"
    done
    for file in "${files[@]+"${files[@]}"}"; do
        read_wslconfig "$file"
        if [[ -n $wslconfig_encoding ]]; then
            found warning wslconfig "${file#"$ROOT"} is $wslconfig_encoding, which Windows ignores: WSL has $((total / 1024)) GiB$([[ -z $wslconfig_memory_mib ]] || echo ", whatever it asks for")" \
                "save it as UTF-8 (Notepad: Save as, Encoding), then wsl --shutdown"
            continue
        fi
        [[ -z $wslconfig_problem ]] || found warning wslconfig "${file#"$ROOT"}, $wslconfig_problem" "correct it, then wsl --shutdown"
        wished=$wslconfig_memory_mib
        # what the kernel keeps for itself is not in MemTotal: 5 % at most
        if [[ -n $wished ]] && ((total * 100 < wished * 93)); then
            found warning wslconfig "it asks for $((wished / 1024)) GiB, WSL has $((total / 1024))" \
                "wsl --shutdown and start again (it is read at the start only); more than Windows has is not given"
        fi
    done
}

# read_wslconfig FILE: sets wslconfig_encoding (empty when it is one that Windows reads), _problem (the first),
# _memory_mib, _network (networkingMode), _forwarding (localhostForwarding); empty where not told.
read_wslconfig() {
    local line section="" number=0 text head
    wslconfig_encoding="" wslconfig_problem="" wslconfig_memory_mib="" wslconfig_network="" wslconfig_forwarding=""
    head=$(od -An -tx1 -N 4 "$1" | tr -d ' \n')
    case $head in
        fffe*) wslconfig_encoding=UTF-16 text=$(iconv -f UTF-16 -t UTF-8 "$1" 2>/dev/null) ;;
        feff*) wslconfig_encoding=UTF-16 text=$(iconv -f UTF-16 -t UTF-8 "$1" 2>/dev/null) ;;
        ??00*) wslconfig_encoding="UTF-16 without a mark" text=$(iconv -f UTF-16LE -t UTF-8 "$1" 2>/dev/null) ;;
        *) text=$(tr -d '\000' <"$1") ;;
    esac
    text=${text#$'\xef\xbb\xbf'}
    while IFS= read -r line; do
        number=$((number + 1))
        line=$(trimmed "${line//$'\r'/}")
        if [[ -z $line || $line == [\#\;]* ]]; then
            continue
        elif [[ $line =~ ^\[(.*)\]$ ]]; then
            section=${BASH_REMATCH[1],,}
            [[ $section == wsl2 || $section == experimental ]] ||
                wslconfig_trouble "line $number: no section [${BASH_REMATCH[1]}] is read there; the one for memory is [wsl2]"
        elif [[ $line == *=* ]]; then
            wslconfig_entry "$number" "$section" "$(trimmed "${line%%=*}")" "$(trimmed "${line#*=}")"
        else
            wslconfig_trouble "line $number: neither a section nor key=value: $line"
        fi
    done <<<"$text"
}

trimmed() { [[ $1 =~ ^[[:space:]]*(.*[^[:space:]])?[[:space:]]*$ ]] && echo "${BASH_REMATCH[1]}"; }

wslconfig_trouble() { wslconfig_problem=${wslconfig_problem:-$1}; }

wslconfig_entry() { # NUMBER SECTION KEY VALUE
    local known=" kernel kernelmodules memory processors localhostforwarding kernelcommandline safemode swap swapfile
        guiapplications debugconsole maxcrashdumpcount nestedvirtualization vmidletimeout dnsproxy networkingmode firewall
        dnstunneling autoproxy defaultvhdsize pagereporting "
    case $2 in
        "") wslconfig_trouble "line $1: $3 stands before [wsl2]" ;;
        wsl2) [[ $known =~ [[:space:]]${3,,}[[:space:]] ]] || wslconfig_trouble "line $1: no key '$3' is read there" ;;
    esac
    case $2/${3,,} in
        wsl2/memory)
            if [[ ${4,,} =~ ^([0-9]+)(gb|mb)$ ]]; then
                wslconfig_memory_mib=${BASH_REMATCH[1]}
                [[ ${BASH_REMATCH[2]} == mb ]] || wslconfig_memory_mib=$((wslconfig_memory_mib * 1024))
            else
                wslconfig_trouble "line $1: memory=$4: a whole number with GB or MB, such as 48GB"
            fi
            ;;
        */networkingmode) wslconfig_network=${4,,} ;;
        wsl2/localhostforwarding) wslconfig_forwarding=${4,,} ;;
    esac
}

# Do the weights of --model FOLDER fit where they go? A GiB beside them is the least for cache and activations.
check_model() {
    local weights room where
    [[ -n $model ]] || return 0
    if [[ ! -d $model ]]; then
        if [[ $model == [/.~]* ]]; then
            found stop model "no folder $model" "--model with the folder's full path, or a name on the hub"
        else
            found ok model "$model is a name on the hub, not looked at from here"
        fi
        return
    fi
    if [[ ! -f $model/config.json ]]; then
        found stop model "no config.json in $model" "--model with the folder that has it"
        return
    fi
    weights=$(du -mcL "$model"/*.safetensors "$model"/*.bin "$model"/*.gguf 2>/dev/null | awk 'END { print $1 + 0 }')
    if [[ $device != cpu && -n ${gpu_total_mib-} ]]; then
        room=$(awk -v u="$utilization" -v t="$gpu_total_mib" 'BEGIN { printf "%d", u * t }') where="the GPU at utilization $utilization"
    else
        room=$(available_mib) where="free memory"
    fi
    if ((weights + 1024 > room)); then
        found warning model "weights of $(gib "$weights") GiB, $(gib "$room") GiB of $where" "a smaller or quantised model$([[ $where == free* ]] || echo ", or --cpu-offload-gb for vLLM")"
    else
        found ok model "weights of $(gib "$weights") GiB, $(gib "$room") GiB of $where"
    fi
}

# ---------------------------------------------------------------- disk and folders

# the nearest folder above that exists
existing() {
    local path=$1
    while [[ ! -d $path ]]; do path=$(dirname "$path"); done
    echo "$path"
}

free_gib() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print int($4 / 1048576) }'; }

check_disk() {
    local need=$DISK_CPU_GIB where free windows
    [[ $device == gpu || ($device == auto && -n ${gpu_name-}) ]] && need=$DISK_GPU_GIB
    where=$(existing "$venv")
    free=$(free_gib "$where")
    if [[ -f $venv/.step-vllm ]]; then
        found ok disk "${free:-?} GiB free at $where; the environment is there already"
    elif [[ -n $free ]] && ((free < need)); then
        found stop disk "$free GiB free at $where, the environment needs $need" "free some, or --venv DIR on another disk"
    else
        found ok disk "${free:-?} GiB free at $where, the environment needs $need"
    fi
    # The disk of WSL looks a terabyte large, but is a file on C:
    if [[ $system == wsl2 && -d $ROOT/mnt/c ]]; then
        windows=$(free_gib "$ROOT/mnt/c")
        if [[ -n $windows ]] && ((windows < need)) && [[ ! -f $venv/.step-vllm ]]; then
            found warning disk-windows "$windows GiB free on C:, where WSL's disk lies; the environment needs $need" "free some on Windows"
        fi
    fi
}

# A folder of Windows, which Linux reads through a file server: ten times slower and worse for many small files.
is_slow() { [[ $1 =~ ^/mnt/[a-z](/|$) ]]; }

check_folders() {
    local hub=${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}} slow=""
    if is_slow "$clone"; then
        found warning folder "the clone is on Windows' disk ($clone): slow" "clone again into Linux' own home: cd ~ && git clone ..."
        slow=1
    fi
    if is_slow "$venv"; then
        found warning folder-venv "the environment would be on Windows' disk ($venv): minutes to import" "leave --venv out: it goes to ~/.local/share/loadgen"
        slow=1
    fi
    if is_slow "$hub"; then
        found warning folder-hub "models from the hub go to Windows' disk ($hub): minutes to load" "export HF_HOME=~/.cache/huggingface"
        slow=1
    fi
    if [[ -n $model ]] && is_slow "$model"; then
        found warning folder-model "the model is on Windows' disk ($model): minutes to load" "cp -r '$model' ~/models/"
        slow=1
    fi
    [[ -n $slow ]] || found ok folders "on Linux' own disk"
}

check_open_files() {
    local soft hard
    soft=$(ulimit -Sn) hard=$(ulimit -Hn)
    if [[ $hard != unlimited ]] && ((hard < 4096)); then
        found warning open-files "at most $hard open files: enough for about $((hard - 100)) requests at once" "raise nofile in /etc/security/limits.conf, log in again"
    elif [[ $soft != unlimited ]] && ((soft < 4096)); then
        found ok open-files "$soft open files, enough for about $((soft - 100)) requests at once; for more: ulimit -n $([[ $hard == unlimited ]] && echo 65536 || echo "$hard")"
    else
        found ok open-files "$soft open files"
    fi
}

# ---------------------------------------------------------------- Python, compiler, environment variables

check_python() {
    look_for_python
    if [[ -n $base_python ]]; then
        found ok python "$base_python (Python $base_version)"
    else
        found stop python "$python_problem" "$python_remedy"
    fi
}

check_compiler() {
    local header
    if ! type -P "${CXX:-g++}" >/dev/null || ! type -P "${CC:-gcc}" >/dev/null; then
        found warning compiler "no C and C++ compiler: vLLM compiles its kernels when it starts" \
            "sudo apt install build-essential; without: --enforce-eager (start_vllm.sh takes it by itself on the CPU)"
        return
    fi
    if [[ -n $base_python && -n ${gpu_name-} ]]; then
        header=$("$base_python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null) || true
        if [[ -n $header && ! -e $ROOT$header ]]; then
            found warning compiler "a compiler, but no Python.h: vLLM cannot compile its GPU kernels" "sudo apt install python3-dev"
            return
        fi
    fi
    found ok compiler "$(type -P "${CXX:-g++}")"
}

# vLLM on the CPU is linked against libnuma, which a lean system lacks and no wheel brings.
check_libnuma() {
    [[ $device != gpu && -z ${gpu_name-} || $device == cpu ]] || return 0
    if [[ -n $(library_paths libnuma.so.1) || -e $venv/lib/system/libnuma.so.1 ]]; then
        found ok libnuma "libnuma is there"
    elif type -P apt-get >/dev/null && type -P dpkg-deb >/dev/null; then
        found ok libnuma "no libnuma: install unpacks Debian's into the environment"
    else
        found warning libnuma "no libnuma.so.1, which vLLM on the CPU needs" "install this system's libnuma package (numactl-libs)"
    fi
}

check_environment() {
    local proxy=${https_proxy:-${HTTPS_PROXY:-${http_proxy:-${HTTP_PROXY:-${all_proxy:-${ALL_PROXY-}}}}}}
    local without=,${no_proxy:-${NO_PROXY-}},
    if [[ -n $proxy && $without != *,127.0.0.1,* && $without != *,\*,* ]]; then
        # a proxy's address may hold a password: not printed
        found warning proxy "a proxy is set and no_proxy lacks 127.0.0.1: programs may ask it for the servers here" \
            "export no_proxy=127.0.0.1,localhost"
    elif [[ -n $proxy ]]; then
        found ok proxy "a proxy is set, not for 127.0.0.1"
    fi
    [[ -z ${PYTHONHOME-} ]] || found stop pythonhome "PYTHONHOME is set: no environment works with it" "unset PYTHONHOME"
    [[ -z ${PYTHONPATH-} ]] || found warning pythonpath "PYTHONPATH is set: packages there hide those of the environment" "unset PYTHONPATH"
    [[ -z ${SUDO_USER-} ]] || found warning sudo "started by sudo: the environment would belong to root" "run it as $SUDO_USER; no root is needed"
}

# ---------------------------------------------------------------- port

check_port() {
    local file network="" forwarding=""
    if port_answers 127.0.0.1 "$port"; then
        found warning port "port $port is in use$(port_holder "$port")" "stop what runs there, or --port with another number for the servers"
    else
        found ok port "port $port is free"
    fi
    [[ $system == wsl2 ]] || return 0
    for file in "${LOADGEN_WSLCONFIG-}" "$ROOT"/mnt/c/Users/*/.wslconfig; do
        [[ -r $file ]] || continue
        read_wslconfig "$file"
        [[ -n $wslconfig_encoding ]] || { network=$wslconfig_network forwarding=$wslconfig_forwarding; }
        break
    done
    case $network/$forwarding in
        mirrored/*) found ok windows-port "mirrored networking: Windows reaches the servers at http://127.0.0.1:$port" ;;
        none/*) found warning windows-port "networkingMode=none: WSL has no network" "remove it from .wslconfig, then wsl --shutdown" ;;
        */false) found warning windows-port "localhostForwarding=false: Windows does not reach the servers" "remove it from .wslconfig, then wsl --shutdown" ;;
        *) found ok windows-port "Windows reaches the servers at http://localhost:$port (localhost forwarding)" ;;
    esac
}
