"""Machines made up for the scripts: a folder for /proc, /sys, /usr/lib/wsl and /mnt, and a PATH of its own.

LOADGEN_ROOT puts the folder before what the scripts read; the PATH holds links to the plain tools and the stubs of the
test, so that nothing of the real machine (a GPU, say) shows through.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent

TOOLS = """awk basename bash cat chmod cp cut date df dirname du env find getconf grep head iconv id kill ln ls
mkdir mktemp mv nproc od printf ps readlink rm sed seq setpriv setsid sh sha256sum sleep sort ss
stat tail timeout touch tr true uname wc which""".split()

NATIVE = "Linux version 6.8.0-31-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-13) #31-Ubuntu SMP"
WSL2 = (
    "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@builder) (gcc 11.2.0) #1 SMP Fri Mar 29 23:14:13 UTC 2024"
)
WSL1 = (
    "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com) (gcc version 5.4.0 (GCC) ) "
    "#1237-Microsoft Sat Sep 11 14:32:00 PST 2021"
)


class Machine:
    """One machine: a native Ubuntu with 32 GiB, 24 of them free, no GPU, a fresh home."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.bin = folder / "bin"
        self.home = folder / "home"
        for made in (self.root, self.bin, self.home):
            made.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (self.bin / tool).symlink_to(found)
        (self.bin / "python3").symlink_to(sys.executable)
        self.stub("g++", "exit 0")
        self.write("/proc/version", NATIVE + "\n")
        self.memory(32 * 1024, 24 * 1024)
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "LOADGEN_ROOT": str(self.root),
            "LC_ALL": "C.UTF-8",
        }

    def write(self, path: str, text: str | bytes) -> Path:
        """A file of the machine, at its absolute path."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def stub(self, name: str, script: str, folder: Path | None = None) -> Path:
        """A command that runs these lines of bash instead of the real one."""
        file = (folder or self.bin) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        file.chmod(0o755)
        return file

    def memory(self, total_mib: int, free_mib: int, swap_mib: int = 8192) -> None:
        self.write(
            "/proc/meminfo",
            f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {free_mib * 1024} kB\nSwapTotal: {swap_mib * 1024} kB\n",
        )

    def gpu(
        self,
        total_mib: int = 24564,
        free_mib: int = 23028,
        capability: str = "8.9",
        driver: str = "591.44",
        cuda: str = "13.1",
        name: str = "NVIDIA GeForce RTX 4090",
        wsl: bool = False,
    ) -> None:
        """nvidia-smi as the driver brings it: on PATH, or under WSL beside libcuda where no PATH leads."""
        table = (
            f"| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |\n"
            f"|  0%   40C   P8   20W / 450W | {total_mib - free_mib}MiB / {total_mib}MiB | 0% Default |"
        )
        self.stub(
            "nvidia-smi",
            f"""case "$*" in
                *--query-gpu=*) echo '{name}, {total_mib}, {free_mib}, {driver}, {capability}' ;;
                *-L*) echo 'GPU 0: {name} (UUID: GPU-0)' ;;
                *) echo '{table}' ;;
            esac""",
            self.root / "usr/lib/wsl/lib" if wsl else None,
        )
        if wsl:
            self.write("/usr/lib/wsl/lib/libcuda.so.1", "")

    def run(self, *command: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", *command],
            env={**self.environment, **environment},
            cwd=CLONE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", *command],
            env={**self.environment, **environment},
            cwd=CLONE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # tests started in the background of a shell inherit that Ctrl-C is ignored, and then nobody can trap it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def alive(pid: int) -> bool:
    """A process that runs; one that has ended and waits to be collected does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
