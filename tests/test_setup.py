"""setup.sh check on made-up machines, and what install decides before it writes anything.

The situations are those of newcomers on Windows with WSL 2: told by stub commands and a root folder of our own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.machines import CLONE, NATIVE, WSL1, WSL2, Machine

RTX5090 = {"total_mib": 32604, "free_mib": 30843, "capability": "12.0", "name": "NVIDIA GeForce RTX 5090"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.stub("gcc", "exit 0")
    made.stub("ldconfig", "echo '\tlibnuma.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnuma.so.1'")
    made.write(sysconfig.get_paths()["include"] + "/Python.h", "")
    made.write("/proc/cpuinfo", "flags\t\t: fpu sse avx avx2 avx512f\n")
    made.environment["VENV"] = str(tmp_path / "venv")
    return made


def check(machine: Machine, *flags: str, **environment: str) -> dict[str, dict[str, Any]]:
    """The findings by name: {level, what, todo}."""
    done = machine.run("setup.sh", "check", "--json", "--venv", machine.environment["VENV"], *flags, **environment)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told["format"] == "loadgen.check/1"
    stops = [finding for finding in told["findings"] if finding["level"] == "stop"]
    assert told["ok"] is (not stops)
    assert done.returncode == (1 if stops else 0)
    for finding in told["findings"]:
        assert finding["level"] in ("ok", "warning", "stop")
        assert finding["what"] and "\n" not in finding["what"]
        # what is not ok comes with something to do
        assert finding["level"] == "ok" or finding["todo"]
    return {finding["name"]: finding for finding in told["findings"]}


def troubles(findings: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, finding in findings.items() if finding["level"] != "ok"}


# ---------------------------------------------------------------- which system


def test_a_good_native_machine_has_nothing_to_complain_about(machine: Machine) -> None:
    findings = check(machine)
    assert troubles(findings) == set()
    assert findings["system"]["what"] == "Linux, kernel 6.8.0"
    assert "wsl" not in json.dumps(findings).lower()  # no advice that does not fit
    assert "runs on the CPU" in findings["gpu"]["what"]


def test_wsl2(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.write("/etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n')
    machine.gpu(wsl=True)
    findings = check(machine)
    assert troubles(findings) == set()
    assert findings["system"]["what"] == "WSL 2, kernel 5.15.153.1, Ubuntu 24.04.3 LTS"
    assert "expected, not an error" in findings["pinned"]["what"]
    assert "Windows reaches" in findings["windows-port"]["what"]


def test_wsl1_stops(machine: Machine) -> None:
    machine.write("/proc/version", WSL1)
    findings = check(machine, WSL_DISTRO_NAME="Ubuntu-22.04")
    assert findings["system"]["level"] == "stop"
    assert "wsl --set-version Ubuntu-22.04 2" in findings["system"]["todo"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (WSL2, "WSL 2"),
        (WSL2.replace("microsoft", "Microsoft"), "WSL 2"),
        ("Linux version 6.6.87.2-microsoft-standard-WSL2+ (me@home) (gcc 13) #1 SMP", "WSL 2"),
        ("Linux version 6.1.21.1-WSL2-custom (me@home) (gcc 13) #1 SMP", "WSL 2"),
        (WSL1, "WSL 1"),
        (NATIVE, "Linux"),
        # a native kernel built by someone at Microsoft, as on Azure
        ("Linux version 6.5.0-1021-azure (buildd@lcy02) (gcc 11.4.0) #22-Ubuntu SMP microsoft", "Linux"),
    ],
)
def test_the_whole_release_text_decides(machine: Machine, text: str, kind: str) -> None:
    machine.write("/proc/version", text + "\n")
    assert check(machine)["system"]["what"].startswith(kind)


def test_a_kernel_of_ones_own_under_wsl2(machine: Machine) -> None:
    machine.write("/proc/version", "Linux version 6.6.36-mine (me@home) (gcc 13) #1 SMP")
    machine.write("/proc/sys/fs/binfmt_misc/WSLInterop", "enabled")
    (machine.root / "run/WSL").mkdir(parents=True)
    assert check(machine)["system"]["what"].startswith("WSL 2, kernel 6.6.36")


@pytest.mark.parametrize(
    ("version", "old"), [("5.10.16.3", True), ("5.10.43.3", False), ("5.4.72", True), ("6.6.87.2", False)]
)
def test_the_kernel_must_be_new_enough_for_cuda(machine: Machine, version: str, old: bool) -> None:
    machine.write("/proc/version", f"Linux version {version}-microsoft-standard-WSL2 (oe-user@oe-host) #1 SMP")
    findings = check(machine)
    assert ("kernel" in findings) is old
    if old:
        assert "5.10.43.3 or newer" in findings["kernel"]["what"] and "wsl --update" in findings["kernel"]["todo"]


@pytest.mark.parametrize(("build", "old"), [("22631.3447", False), ("19043.1", True)])
def test_windows_build(machine: Machine, build: str, old: bool) -> None:
    machine.write("/proc/version", WSL2)
    machine.stub(
        "cmd.exe", f"printf 'Microsoft Windows [Version 10.0.{build}]\\r\\n'", machine.root / "mnt/c/Windows/System32"
    )
    findings = check(machine)
    assert f"Windows build {build.split('.')[0]}" in findings["system"]["what"]
    assert ("windows" in findings) is old


def test_git_bash_on_windows(machine: Machine) -> None:
    machine.stub("uname", "echo MINGW64_NT-10.0-22631")
    findings = check(machine)
    assert findings["system"]["level"] == "stop" and "wsl" in findings["system"]["todo"]
    assert list(findings) == ["system"]


def test_a_processor_without_wheels(machine: Machine) -> None:
    machine.stub("uname", "[[ $1 == -m ]] && echo riscv64 || echo Linux")
    assert check(machine)["processor"]["level"] == "stop"


def test_a_processor_without_avx2(machine: Machine) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the flags are those of x86")
    machine.write("/proc/cpuinfo", "flags\t\t: fpu sse avx\n")
    assert check(machine)["processor"]["level"] == "warning"


# ---------------------------------------------------------------- the GPU


def test_the_gpu_of_wsl_that_no_path_leads_to(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.gpu(wsl=True)
    machine.stub("ldconfig", "echo '\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/wsl/lib/libcuda.so.1'")
    done = machine.run("setup.sh", "check")
    assert "RTX 4090" in done.stdout and "usr/lib/wsl/lib/nvidia-smi" in done.stdout
    assert "apt install nvidia" not in done.stdout and "nvidia-driver" not in done.stdout
    assert check(machine)["libcuda"]["level"] == "ok"


def test_a_linux_driver_inside_wsl_hides_windows_own(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.gpu(wsl=True)
    machine.stub("ldconfig", "echo '\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1'")
    finding = check(machine)["libcuda"]
    assert finding["level"] == "warning"
    assert "apt purge" in finding["todo"] and "apt install" not in finding["todo"]


def test_wsl_without_libcuda(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.gpu(wsl=True)
    (machine.root / "usr/lib/wsl/lib/libcuda.so.1").unlink()
    finding = check(machine, "--gpu")["libcuda"]
    assert finding["level"] == "stop"
    assert "on Windows" in finding["todo"] and "never a Linux display driver" in finding["todo"]


@pytest.mark.parametrize(
    ("wsl", "advice"),
    [(True, "newest NVIDIA driver on Windows"), (False, "NVIDIA's driver 580 or newer for this Linux")],
)
@pytest.mark.parametrize(("flags", "level"), [([], "warning"), (["--gpu"], "stop")])
def test_a_driver_too_old(machine: Machine, wsl: bool, advice: str, flags: list[str], level: str) -> None:
    machine.write("/proc/version", WSL2 if wsl else NATIVE)
    machine.gpu(driver="560.94", cuda="12.6", wsl=wsl)
    finding = check(machine, *flags)["driver"]
    assert finding["level"] == level
    assert finding["what"].startswith("driver 560.94 knows CUDA 12.6, the wheels need 13.0")
    assert advice in finding["todo"]
    assert not wsl or "apt" not in finding["todo"]


@pytest.mark.parametrize(
    ("capability", "level", "words"),
    [
        ("6.1", "warning", "the wheels need 7.5"),
        ("7.5", "ok", "--dtype half"),
        ("8.6", "ok", "has bfloat16"),
        ("12.0", "ok", "has bfloat16"),
    ],
)
def test_compute_capability(machine: Machine, capability: str, level: str, words: str) -> None:
    machine.gpu(capability=capability)
    finding = check(machine)["capability"]
    assert finding["level"] == level and words in finding["what"]


def test_vram_that_windows_holds(machine: Machine) -> None:
    machine.gpu(**RTX5090)  # 31.84 GiB, 30.12 free: 0.95 x 31.84 = 30.25, and 30.12 / 31.84 = 0.946
    finding = check(machine, "--gpu-memory-utilization", "0.95")["vram"]
    assert finding["level"] == "warning"
    assert finding["what"] == "utilization 0.95 needs 30.25 GiB, but 30.12 of 31.84 are free"
    assert "--gpu-memory-utilization 0.94 at most" in finding["todo"]
    assert check(machine, "--gpu-memory-utilization", "0.94")["vram"]["level"] == "ok"
    assert check(machine)["vram"]["level"] == "ok"


def test_an_nvidia_smi_that_only_knows_its_table(machine: Machine) -> None:
    machine.stub(
        "nvidia-smi",
        "echo '| NVIDIA-SMI 591.44  Driver Version: 591.44  CUDA Version: 13.1 |'\n"
        "echo '| 30%  40C  P8  20W / 450W |  1761MiB / 32604MiB | 0% |'",
    )
    findings = check(machine, "--gpu-memory-utilization", "0.95")
    assert "driver 591.44, CUDA 13.1" in findings["gpu"]["what"]
    assert "0.94 at most" in findings["vram"]["todo"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "wsl --shutdown"),
        ("Failed to initialize NVML: GPU access blocked by the operating system", "on Windows"),
        ("No devices were found", "on Windows"),
    ],
)
def test_nvidia_smi_that_complains(machine: Machine, said: str, words: str) -> None:
    machine.write("/proc/version", WSL2)
    machine.stub("nvidia-smi", f"echo '{said}'; exit 9")
    finding = check(machine)["gpu"]
    assert finding["level"] == "warning" and said in finding["what"] and words in finding["todo"]
    assert check(machine, "--gpu")["gpu"]["level"] == "stop"
    assert check(machine, "--cpu")["gpu"]["level"] == "ok"


def test_no_gpu(machine: Machine) -> None:
    assert check(machine, "--gpu")["gpu"]["level"] == "stop"
    machine.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    finding = check(machine)["gpu"]
    assert "an NVIDIA card without its driver" in finding["what"] and "for this Linux" in finding["todo"]
    machine.write("/proc/version", WSL2)
    assert "no GPU bridge (/dev/dxg)" in check(machine)["gpu"]["what"]
    machine.write("/dev/dxg", "")
    assert "no nvidia-smi on PATH or in /usr/lib/wsl/lib" in check(machine)["gpu"]["what"]


# ---------------------------------------------------------------- memory and .wslconfig


def wslconfig(machine: Machine, content: bytes, total_mib: int = 32000, user: str = "x") -> dict[str, dict[str, Any]]:
    machine.write("/proc/version", WSL2)
    machine.memory(total_mib, 20000)
    machine.write(f"/mnt/c/Users/{user}/.wslconfig", content)
    return check(machine)


def utf16(text: str) -> bytes:
    return b"\xff\xfe" + text.encode("utf-16-le")


def test_wslconfig_in_utf16_is_ignored_by_windows(machine: Machine) -> None:
    finding = wslconfig(machine, utf16("[wsl2]\r\nmemory=48GB\r\n"))["wslconfig"]
    assert finding["level"] == "warning"
    assert "UTF-16, which Windows ignores: WSL has 31 GiB" in finding["what"]
    assert "48" not in finding["what"] and "UTF-8" in finding["todo"]


GOOD = b"\xef\xbb\xbf# mine\r\n[wsl2]\r\nmemory = 32GB\r\nswap=8GB\r\n\r\n[experimental]\r\nsparseVhd=true\r\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD, None),
        (b"[wsl]\nmemory=48GB\n", "line 1: no section [wsl] is read there; the one for memory is [wsl2]"),
        (b"memory=48GB\n", "line 1: memory stands before [wsl2]"),
        (b"[wsl2]\nmemroy=48GB\n", "line 2: no key 'memroy' is read there"),
        (b"[wsl2]\nmemory=48\n", "line 2: memory=48: a whole number with GB or MB"),
        (b"[wsl2]\nmemory=lots\n", "memory=lots"),
        (b"[wsl2\nmemory=48GB\n", "neither a section nor key=value"),
        (b"[wsl2]\nmemory=48GB\n", "it asks for 48 GiB, WSL has 31"),
        ("[wsl2]\nmemory=48GB".encode("utf-16-le"), "UTF-16 without a mark"),
    ],
)
def test_wslconfig(machine: Machine, content: bytes, words: str | None) -> None:
    findings = wslconfig(machine, content)
    if words is None:
        assert "wslconfig" not in findings
    else:
        assert findings["wslconfig"]["level"] == "warning"
        assert words in findings["wslconfig"]["what"]
        assert "wsl --shutdown" in findings["wslconfig"]["todo"]


def test_wslconfig_elsewhere(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.write("/mnt/c/Users/x/.wslconfig.txt", "[wsl2]\n")
    assert "Windows reads only a file named .wslconfig" in check(machine)["wslconfig"]["what"]
    (machine.root / "mnt/c/Users/x/.wslconfig.txt").unlink()
    (machine.home / ".wslconfig").write_text("[wsl2]\n")
    assert "inside Linux" in check(machine)["wslconfig"]["what"]


@pytest.mark.parametrize(
    ("total_mib", "free_mib", "level"), [(2048, 1500, "stop"), (16384, 2048, "warning"), (8192, 6000, "ok")]
)
def test_memory(machine: Machine, total_mib: int, free_mib: int, level: str) -> None:
    machine.memory(total_mib, free_mib)
    assert check(machine)["memory"]["level"] == level
    machine.write("/proc/version", WSL2)
    finding = check(machine)["memory"]
    assert finding["level"] == level
    assert level == "ok" or "memory= under [wsl2]" in finding["todo"]


def test_the_limit_of_a_container(machine: Machine) -> None:
    machine.write("/sys/fs/cgroup/memory.max", str(2 << 30))
    machine.write("/sys/fs/cgroup/memory.current", "0")
    machine.write("/.dockerenv", "")
    findings = check(machine)
    assert findings["memory"]["level"] == "stop"
    assert "may use 2 of 32 GiB" in findings["memory-limit"]["what"]
    assert "container" in findings


def test_no_swap(machine: Machine) -> None:
    machine.memory(8192, 6000, swap_mib=0)
    assert check(machine)["swap"]["level"] == "warning"
    machine.write("/proc/version", WSL2)
    assert "swap=8GB" in check(machine)["swap"]["todo"]
    machine.memory(65536, 60000, swap_mib=0)
    assert "swap" not in check(machine)


def test_a_model_that_does_not_fit(machine: Machine, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert "no config.json" in check(machine, "--model", str(model))["model"]["what"]
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as file:
        file.write(b"\0" * (5 << 20))
    assert check(machine, "--model", str(model))["model"]["level"] == "ok"
    machine.stub("du", "echo 14336 total")  # 14 GiB
    assert check(machine, "--model", str(model))["model"]["level"] == "ok"  # 24 GiB of memory are free
    machine.gpu(total_mib=16380, free_mib=16000)
    finding = check(machine, "--model", str(model))["model"]
    assert finding["level"] == "warning"
    assert finding["what"] == "weights of 14.0 GiB, 14.4 GiB of the GPU at utilization 0.9"
    assert check(machine, "--model", "/no/such")["model"]["level"] == "stop"
    assert check(machine, "--model", "Qwen/Qwen3-4B")["model"]["level"] == "ok"


# ---------------------------------------------------------------- disk and folders


def test_a_full_disk(machine: Machine) -> None:
    machine.stub("df", "echo Filesystem; echo '/dev/sda 100 50 4194304 50% /'")  # 4 GiB
    finding = check(machine)["disk"]
    assert finding["level"] == "stop" and "4 GiB free" in finding["what"] and "--venv DIR" in finding["todo"]


def test_a_full_disk_of_windows_under_a_large_one_of_wsl(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    (machine.root / "mnt/c").mkdir(parents=True)
    machine.stub(
        "df", 'echo Filesystem; [[ $* == *mnt/c ]] && free=2097152 || free=900000000; echo "/dev/sd 1 1 $free 1% /"'
    )
    findings = check(machine)
    assert findings["disk"]["level"] == "ok"
    assert findings["disk-windows"]["what"].startswith("2 GiB free on C:")


@pytest.mark.parametrize(
    ("flags", "environment", "name"),
    [
        (["--venv", "/mnt/c/Users/x/venv"], {}, "folder-venv"),
        (["--model", "/mnt/d/models/Qwen3-4B"], {}, "folder-model"),
        ([], {"HF_HOME": "/mnt/c/Users/x/hf"}, "folder-hub"),
        ([], {"HF_HUB_CACHE": "/mnt/c/hub"}, "folder-hub"),
    ],
)
def test_folders_on_windows_disk(machine: Machine, flags: list[str], environment: dict[str, str], name: str) -> None:
    machine.write("/proc/version", WSL2)
    finding = check(machine, *flags, **environment)[name]
    assert finding["level"] == "warning" and "/mnt/" in finding["what"] and "~" in finding["todo"]


def clone_on_windows_disk(machine: Machine, command: str) -> subprocess.CompletedProcess[str]:
    """The scripts as if they lay under /mnt/c: a mount of our own, in a namespace of our own."""
    environment = {**machine.environment, "PATH": f"{machine.bin}:/usr/bin:/bin:/usr/sbin:/sbin"}
    script = (
        f"mkdir -p /mnt/c && mount -t tmpfs none /mnt/c && mkdir -p /mnt/c/Users/x && cd /mnt/c/Users/x && {command}"
    )
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr or "mkdir:" in done.stderr:
        pytest.skip("no mount namespaces here")
    return done


def test_a_clone_on_windows_disk_gets_its_environment_in_linux_own(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    copy = f"cp -r {CLONE}/setup.sh {CLONE}/setup {CLONE}/server . && bash setup.sh check"
    done = clone_on_windows_disk(machine, copy)
    assert "the clone is on Windows' disk (/mnt/c/Users/x)" in done.stdout
    assert "cd ~ && git clone" in done.stdout
    assert "folder-venv" not in done.stdout
    assert f"free at {machine.home}" in done.stdout


# ---------------------------------------------------------------- Python, compiler, the rest


BROKEN_VENV = 'if [[ "$*" == *"-m venv"* ]]; then echo "ensurepip is not available"; exit 1; fi; exec {python} "$@"'


@pytest.mark.parametrize("command", ["install", "test", "demo"])
def test_a_python_without_venv_stops_at_once_and_changes_nothing(machine: Machine, command: str) -> None:
    machine.stub("python3", BROKEN_VENV.format(python=shutil.which("python3")))
    done = machine.run("setup.sh", command, "--venv", machine.environment["VENV"])
    assert done.returncode == 1
    assert "python3-venv" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not Path(machine.environment["VENV"]).exists()
    finding = check(machine)["python"]
    assert finding["level"] == "stop" and finding["todo"] == "sudo apt install python3-venv"


def test_a_python_without_ensurepip(machine: Machine) -> None:
    machine.stub("python3", "[[ $2 == *ensurepip* ]] && echo 3.11.7; exit 1")
    assert "ensurepip is not there" in check(machine)["python"]["what"]


def test_a_python_that_only_says_that_ensurepip_is_missing(machine: Machine) -> None:
    good = (machine.bin / "python3").readlink()
    machine.stub("python3", "echo 'ensurepip is not available'; exit 1")
    (machine.bin / "python3.12").symlink_to(good)
    assert check(machine)["python"]["todo"] == "sudo apt install python3-venv"


def test_a_python_too_old_beside_one_that_fits(machine: Machine) -> None:
    good = (machine.bin / "python3").readlink()
    machine.stub("python3", "echo 3.10.12; echo complete")
    finding = check(machine)["python"]
    assert finding["level"] == "stop" and "Python 3.10.12 is not one of 3.11 to 3.14" in finding["what"]
    (machine.bin / "python3.12").symlink_to(good)
    assert "python3.12" in check(machine)["python"]["what"]


def test_no_python(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    assert check(machine)["python"]["todo"] == "sudo apt install python3 python3-venv"


def test_apt_runs_only_with_the_users_word(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    ran = machine.home / "ran"
    machine.stub("apt-get", f'echo "$*" >>{ran}')
    machine.stub("sudo", f'echo sudo >>{ran}; "$@"')
    machine.stub("id", "echo 1000")
    done = machine.run("setup.sh", "--venv", machine.environment["VENV"])
    assert done.returncode == 1 and not ran.exists()
    assert "sudo apt install python3 python3-venv (or --yes" in done.stderr
    done = machine.run("setup.sh", "--yes", "--venv", machine.environment["VENV"])
    assert done.returncode == 1  # the stub brings none
    assert ran.read_text().splitlines() == ["sudo", "update", "sudo", "install --yes python3 python3-venv"]


def test_no_compiler(machine: Machine) -> None:
    (machine.bin / "gcc").unlink()
    finding = check(machine)["compiler"]
    assert (
        finding["level"] == "warning" and "build-essential" in finding["todo"] and "--enforce-eager" in finding["todo"]
    )


def test_no_headers_for_the_gpus_kernels(machine: Machine) -> None:
    machine.gpu()
    assert check(machine)["compiler"]["level"] == "ok"
    next(machine.root.rglob("Python.h")).unlink()
    assert "python3-dev" in check(machine)["compiler"]["todo"]


@pytest.mark.parametrize(
    ("environment", "name", "level"),
    [
        ({"https_proxy": "http://me:secret@proxy:3128"}, "proxy", "warning"),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost"}, "proxy", "warning"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, "proxy", "ok"),
        ({"PYTHONPATH": "/opt/other"}, "pythonpath", "warning"),
        ({"SUDO_USER": "me"}, "sudo", "warning"),
    ],
)
def test_environment_variables(machine: Machine, environment: dict[str, str], name: str, level: str) -> None:
    finding = check(machine, **environment)[name]
    assert finding["level"] == level
    assert "secret" not in json.dumps(finding)


def test_pythonhome_stops(machine: Machine) -> None:
    machine.stub("python3", f'unset PYTHONHOME; exec {shutil.which("python3")} "$@"')
    assert check(machine, PYTHONHOME="/opt/conda")["pythonhome"]["level"] == "stop"


def test_a_port_in_use(machine: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = check(machine, "--port", str(port))["port"]
    assert finding["level"] == "warning" and f"port {port} is in use" in finding["what"]


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        ("[wsl2]\nnetworkingMode=mirrored\n", "ok", "mirrored networking"),
        ("[wsl2]\nlocalhostForwarding=false\n", "warning", "does not reach"),
        ("[wsl2]\nnetworkingMode=none\n", "warning", "no network"),
        ("[wsl2]\nprocessors=4\n", "ok", "localhost forwarding"),
    ],
)
def test_how_windows_reaches_the_port(machine: Machine, text: str, level: str, words: str) -> None:
    finding = wslconfig(machine, text.encode())["windows-port"]
    assert finding["level"] == level and words in finding["what"]


def test_few_open_files(machine: Machine) -> None:
    done = subprocess.run(
        ["bash", "-c", "ulimit -n 1024; exec bash setup.sh check --json --venv /nowhere"],
        env=machine.environment,
        cwd=CLONE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    finding = next(one for one in json.loads(done.stdout)["findings"] if one["name"] == "open-files")
    assert finding["level"] == "warning" and "924 requests" in finding["what"]


def test_libnuma(machine: Machine) -> None:
    assert check(machine)["libnuma"]["level"] == "ok"
    machine.stub("ldconfig", "exit 0")
    assert check(machine)["libnuma"]["level"] == "warning"
    machine.stub("apt-get", "exit 1")
    machine.stub("dpkg-deb", "exit 1")
    assert "install unpacks" in check(machine)["libnuma"]["what"]
    machine.gpu()
    assert "libnuma" not in check(machine)


# ---------------------------------------------------------------- parts of install


def part_of_install(machine: Machine, commands: str) -> subprocess.CompletedProcess[str]:
    venv = machine.environment["VENV"]
    Path(venv).mkdir(exist_ok=True)
    script = f"set -euo pipefail; venv={venv}; log={venv}/log; clone={CLONE}; cd {CLONE}"
    sources = "source server/machine.sh; source setup/check.sh; source setup/install.sh"
    return machine.run("-c", f"{script}; {sources}; {commands}")


def test_half_installed_packages_are_dropped(machine: Machine) -> None:
    """As pip leaves them when it is killed: without RECORD, or with the wheel's own, which does not name INSTALLER."""
    site = Path(machine.environment["VENV"]) / "lib/python3.11/site-packages"
    whole, unpacked, begun = (site / f"{name}-1.0.dist-info" for name in ("whole", "unpacked", "begun"))
    for folder in (whole, unpacked, begun):
        folder.mkdir(parents=True)
        (folder / "METADATA").touch()
    (whole / "RECORD").write_text(
        "whole.py,,\nwhole-1.0.dist-info/INSTALLER,sha256=x,4\nwhole-1.0.dist-info/RECORD,,\n"
    )
    (unpacked / "RECORD").write_text("unpacked.py,,\nunpacked-1.0.dist-info/RECORD,,\n")
    assert part_of_install(machine, "drop_half_installed").returncode == 0
    assert sorted(site.iterdir()) == [whole]


def test_this_environments_packages_are_whole(machine: Machine) -> None:
    """The rule above holds for what pip really writes."""
    site = Path(sysconfig.get_paths()["purelib"])
    records = list(site.glob("pytest-*.dist-info/RECORD")) + list(site.glob("numpy-*.dist-info/RECORD"))
    assert len(records) == 2
    for record in records:
        assert ".dist-info/INSTALLER" in record.read_text()


def test_libnuma_is_unpacked_without_root(machine: Machine) -> None:
    machine.stub("ldconfig", "exit 0")
    machine.stub("apt-get", "[[ $* == *Dir::State* ]] || exit 1; [[ $* != *download* ]] || : >libnuma1_2_amd64.deb")
    machine.stub(
        "dpkg-deb",
        "mkdir -p $3/usr/lib; : >$3/usr/lib/libnuma.so.1.0.0; ln -s libnuma.so.1.0.0 $3/usr/lib/libnuma.so.1",
    )
    done = part_of_install(machine, "install_libnuma")
    assert done.returncode == 0, done.stderr
    folder = Path(machine.environment["VENV"]) / "lib/system"
    assert sorted(path.name for path in folder.iterdir()) == ["libnuma.so.1", "libnuma.so.1.0.0"]


@pytest.mark.parametrize(
    ("found", "why"), [({}, "gpu"), ({"cuda": "12.6"}, "CUDA 12.6"), ({"capability": "7.0"}, "7.0")]
)
def test_which_build_is_taken(machine: Machine, found: dict[str, Any], why: str) -> None:
    machine.gpu(**found)
    say = 'say() { echo "$*" >&2; }'
    choose = f'{say}; system=native; python=false; device=auto; choose_device; echo "$device"'
    done = part_of_install(machine, choose)
    assert done.stdout.strip() == ("cpu" if found else "gpu")
    assert not found or (why in done.stderr and "so CPU" in done.stderr)
    # and kept, should the GPU be gone for a while
    (machine.bin / "nvidia-smi").unlink()
    assert part_of_install(machine, choose).stdout == done.stdout


# ---------------------------------------------------------------- flags, and what a check must not do


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["instal"], "unknown command 'instal': check, install, demo or test"),
        (["check", "--jsn"], "check takes no '--jsn'"),
        (["install", "--json"], "install takes no '--json'"),
        (["--venv"], "--venv needs a value"),
        (["check", "--port", "70000"], "--port: a whole number from 1 to 65535, got '70000'"),
        (["check", "--gpu-memory-utilization", "95"], "above 0, at most 1, got '95'"),
    ],
)
def test_wrong_flags(machine: Machine, arguments: list[str], words: str) -> None:
    done = machine.run("setup.sh", *arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_check_changes_nothing(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.gpu(wsl=True)

    def state() -> set[Path]:
        return {path for folder in (machine.root, machine.home) for path in folder.rglob("*")}

    before = state()
    check(machine)
    assert state() == before
    assert not Path(machine.environment["VENV"]).exists()


def test_as_text(machine: Machine) -> None:
    machine.write("/proc/version", WSL1)
    done = machine.run("setup.sh", "check", "--venv", machine.environment["VENV"])
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("stop     system       WSL 1 (kernel 4.4.0)")
    assert lines[1].strip().startswith("-> convert to WSL 2")
    assert lines[-1].startswith("1 to stop for, ")


def test_wsl1_is_not_installed_on(machine: Machine) -> None:
    machine.write("/proc/version", WSL1)
    done = machine.run("setup.sh", "--venv", machine.environment["VENV"])
    assert done.returncode == 1 and "wsl --set-version" in done.stderr
    assert not Path(machine.environment["VENV"]).exists()


# ---------------------------------------------------------------- the files themselves


def scripts() -> list[Path]:
    return sorted(
        path
        for pattern in ("*.sh", "setup/*.sh", "server/*.sh", "benchmarks/**/*.sh", ".ci/run")
        for path in CLONE.glob(pattern)
    )


def test_line_ends(tmp_path: Path) -> None:
    assert len(scripts()) >= 7
    for path in scripts():
        assert b"\r" not in path.read_bytes(), path
    attributes = subprocess.run(
        ["git", "check-attr", "eol", "setup.sh", "server/start_vllm.sh", "setup/check.sh"],
        cwd=CLONE,
        capture_output=True,
        text=True,
    )
    if attributes.returncode:
        pytest.skip("not a git checkout")
    assert [line.split(": ")[-1] for line in attributes.stdout.splitlines()] == ["lf"] * 3


def test_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("no shellcheck here")
    done = subprocess.run(
        [shellcheck, "-x", *map(str, scripts())], cwd=CLONE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_never_break_system_packages() -> None:
    for path in scripts():
        assert "--break-system-packages" not in path.read_text()
