"""start_vllm.sh and start_reference.sh: the command they choose, how they wait, stop and explain a failure.

The servers are stand-ins: a Python that serves /health, or says what vLLM, torch and CUDA really say and ends.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines import WSL2, Machine, alive, free_port

VLLM = "server/start_vllm.sh"
REFERENCE = "server/start_reference.sh"

# What the scripts ask of a Python, and a server that does what FAKE_SERVER says.
FAKE_PYTHON = f"""#!{sys.executable}
import os, signal, subprocess, sys, time

arguments = sys.argv[1:]
if arguments == ["-"]:  # which build is installed
    print(os.environ.get("FAKE_BUILD", "cpu 0.32.0"))
elif arguments[0] == "-":  # config.json's context
    exec(sys.stdin.read().replace("sys.argv[1]", repr(arguments[1])))
elif arguments[0] == "-c" or arguments[:2] == ["-m", "server.packaged_model"]:
    if os.environ.get("FAKE_PACKAGED") == "missing" and arguments[0] == "-m":
        sys.exit("packaged_model: the packaged model is not installed")
    print(os.environ["FAKE_MODEL"])
else:
    do, _, text = os.environ["FAKE_SERVER"].partition(":")
    sys.stdout.write(text)
    sys.stdout.flush()
    if do == "end":
        sys.exit(1)
    if do.startswith("kill"):
        os.kill(os.getpid(), int(do[4:]))
    if do == "hang":
        time.sleep(60)
    # an engine process that does not end when asked, as a CUDA one in a long kernel does not
    engine = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE)
    child.stdout.readline()
    with open(os.environ["FAKE_PIDS"], "w") as file:
        print(os.getpid(), child.pid, file=file)
    from http.server import BaseHTTPRequestHandler, HTTPServer

    asked = 0

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            global asked
            asked += 1
            self.send_response(200 if asked > 1 else 503)
            self.end_headers()
            if do == "crash" and asked > 1:
                print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
                os._exit(1)

        def log_message(self, *_):
            pass

    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Health).serve_forever()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    model = tmp_path / "models" / "Tiny-1M"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 2048}')
    made.environment |= {
        "LOADGEN_PYTHON": str(python),
        "FAKE_MODEL": str(model),
        "FAKE_PIDS": str(tmp_path / "pids"),
        "FAKE_SERVER": "serve",
    }
    return made


def dry(machine: Machine, script: str, *flags: str, **environment: str) -> tuple[dict[str, str], list[str], str]:
    """The variables and the words of the command that it would run, and what it said beside."""
    done = machine.run(script, "--dry-run", *flags, **environment)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    command = words[len(settings) :]
    assert command[1] == "-m"
    return settings, command, done.stderr


def value(command: list[str], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


# ---------------------------------------------------------------- the command


def test_defaults_on_a_machine_without_gpu(machine: Machine) -> None:
    settings, command, _ = dry(machine, VLLM)
    model = machine.environment["FAKE_MODEL"]
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert value(command, "--model") == model
    assert value(command, "--served-model-name") == "Tiny-1M"
    assert value(command, "--port") == "8000"
    assert value(command, "--host") == "127.0.0.1"  # vLLM's own default is every interface
    assert value(command, "--max-model-len") == "2048"
    assert value(command, "--dtype") is None
    assert settings["HF_HUB_OFFLINE"] == "1"
    assert settings["VLLM_NO_USAGE_STATS"] == "1"
    assert settings["VLLM_CPU_KVCACHE_SPACE"] == "8"  # (24 - 0 - 2) / 2 = 11 GiB, at most 8


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [(24, "8"), (12, "5"), (6, "2"), (4, "1"), (1, "1")],  # (free - 2) / 2, from 1 to 8
)
def test_cpu_kv_cache_follows_free_memory(machine: Machine, free_gib: int, expected: str) -> None:
    machine.memory(32 * 1024, free_gib * 1024)
    assert dry(machine, VLLM)[0]["VLLM_CPU_KVCACHE_SPACE"] == expected


def test_cpu_kv_cache_leaves_room_for_the_weights_and_the_containers_limit(machine: Machine) -> None:
    weights = Path(machine.environment["FAKE_MODEL"]) / "model.safetensors"
    with weights.open("wb") as file:
        file.write(b"\0" * (20 << 20))
    machine.write("/sys/fs/cgroup/memory.max", str(10 << 30))
    machine.write("/sys/fs/cgroup/memory.current", str(2 << 30))
    # 8 GiB left of the limit, less 20 MiB and 2 GiB, halved: 2.99
    assert dry(machine, VLLM)[0]["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_what_the_user_sets_stays(machine: Machine) -> None:
    settings, command, _ = dry(
        machine,
        VLLM,
        "--port=8123",
        "--max-model-len",
        "1k",
        "--dtype",
        "float32",
        "--hf-overrides={}",
        "--max-num-seqs",
        "4",
        VLLM_CPU_KVCACHE_SPACE="3",
    )
    assert "VLLM_CPU_KVCACHE_SPACE" not in settings  # inherited
    assert (value(command, "--port"), value(command, "--max-model-len")) == ("8123", "1k")
    assert (value(command, "--dtype"), value(command, "--max-num-seqs")) == ("float32", "4")
    assert "--hf-overrides={}" in command


def test_a_name_on_the_hub_is_not_forced_offline(machine: Machine) -> None:
    settings, command, _ = dry(machine, VLLM, "--model", "Qwen/Qwen3-0.6B")
    assert value(command, "--model") == "Qwen/Qwen3-0.6B"
    assert "HF_HUB_OFFLINE" not in settings
    assert "--served-model-name" not in command


def test_without_a_cpp_compiler_eager(machine: Machine) -> None:
    assert "--enforce-eager" not in dry(machine, VLLM)[1]
    (machine.bin / "g++").unlink()
    _, command, said = dry(machine, VLLM)
    assert command.count("--enforce-eager") == 1
    assert "apt install g++" in said
    assert dry(machine, VLLM, "--enforce-eager")[1].count("--enforce-eager") == 1


def test_libnuma_that_setup_brought(machine: Machine) -> None:
    assert "LD_LIBRARY_PATH" not in dry(machine, VLLM)[0]
    folder = Path(machine.environment["LOADGEN_PYTHON"]).parent.parent / "lib" / "system"
    folder.mkdir(parents=True)
    (folder / "libnuma.so.1").touch()
    assert dry(machine, VLLM)[0]["LD_LIBRARY_PATH"] == str(folder)


def test_tcmalloc_is_preloaded_where_it_is(machine: Machine) -> None:
    assert "LD_PRELOAD" not in dry(machine, VLLM)[0]
    library = machine.write(f"/usr/lib/{os.uname().machine}-linux-gnu/libtcmalloc_minimal.so.4", "")
    assert dry(machine, VLLM)[0]["LD_PRELOAD"] == str(library)


@pytest.mark.parametrize(
    ("gpu", "utilization", "dtype"),
    [
        ({}, "0.90", None),  # (23028 - 512) / 24564 = 0.916
        ({"free_mib": 12000}, "0.46", None),  # 11488 / 24564 = 0.4677
        ({"capability": "7.5", "total_mib": 8192, "free_mib": 7000}, "0.79", "half"),  # 6488 / 8192 = 0.7919
        ({"capability": "12.0", "total_mib": 32604, "free_mib": 30843}, "0.90", None),
    ],
)
def test_gpu_limits(machine: Machine, gpu: dict[str, object], utilization: str, dtype: str | None) -> None:
    machine.gpu(**gpu)  # type: ignore[arg-type]
    settings, command, _ = dry(machine, VLLM, FAKE_BUILD="gpu 0.32.0")
    assert value(command, "--gpu-memory-utilization") == utilization
    assert value(command, "--dtype") == dtype
    assert value(command, "--max-model-len") == "auto"
    assert "VLLM_CPU_KVCACHE_SPACE" not in settings


def test_a_utilization_beyond_what_is_free_is_named(machine: Machine) -> None:
    machine.gpu(total_mib=32604, free_mib=30843)  # 31.84 and 30.12 GiB
    _, command, said = dry(machine, VLLM, "--gpu-memory-utilization", "0.95", FAKE_BUILD="gpu 0.32.0")
    assert value(command, "--gpu-memory-utilization") == "0.95"
    assert "0.95 needs 30.2 GiB, but 30.1 are free: at most 0.94" in said
    assert not dry(machine, VLLM, "--gpu-memory-utilization", "0.94", FAKE_BUILD="gpu 0.32.0")[2]


def test_the_wsl_libraries_go_to_the_server(machine: Machine) -> None:
    machine.write("/proc/version", WSL2)
    machine.gpu(wsl=True)
    folder = str(machine.root / "usr/lib/wsl/lib")
    for script in (VLLM, REFERENCE):
        settings, command, said = dry(machine, script, FAKE_BUILD="gpu 0.32.0")
        assert folder in settings["LD_LIBRARY_PATH"].split(":")
        assert folder in settings["PATH"].split(":")
        assert "nvidia-driver" not in said + " ".join(command)


def test_the_build_and_the_device_must_fit(machine: Machine) -> None:
    done = machine.run(VLLM, "--gpu")
    assert done.returncode == 1 and "this environment has the CPU build: bash setup.sh --gpu" in done.stderr
    done = machine.run(VLLM, "--cpu", FAKE_BUILD="gpu 0.32.0")
    assert done.returncode == 1 and "this environment has the GPU build" in done.stderr
    done = machine.run(VLLM, FAKE_BUILD="gpu 0.32.0")
    assert done.returncode == 1 and "no GPU answers (no nvidia-smi)" in done.stderr
    done = machine.run(VLLM, FAKE_BUILD="none")
    assert done.returncode == 1 and "vLLM is not installed" in done.stderr
    machine.stub("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    done = machine.run(VLLM, FAKE_BUILD="gpu 0.32.0")
    assert done.returncode == 1 and "(Failed to initialize NVML: Driver/library version mismatch)" in done.stderr
    machine.gpu()
    assert "a GPU is here (NVIDIA GeForce RTX 4090), but" in dry(machine, VLLM)[2]


def test_the_reference_servers_command(machine: Machine) -> None:
    settings, command, _ = dry(
        machine, REFERENCE, "--mode", "static", "--batch-size=4", "--dtype", "half", "--cpu", "--max-model-len", "512"
    )
    assert command[1:3] == ["-m", "server"]
    assert value(command, "--port") == "8001"
    assert (value(command, "--mode"), value(command, "--dtype"), value(command, "--device")) == (
        "static",
        "float16",
        "cpu",
    )
    assert "--batch-size=4" in command
    assert value(command, "--max-model-len") == "512"
    assert settings["PYTHONPATH"].split(":")[0] == str(Path(__file__).resolve().parent.parent)
    machine.gpu(capability="7.5")
    assert value(dry(machine, REFERENCE)[1], "--dtype") == "float16"


@pytest.mark.parametrize("script", [VLLM, REFERENCE])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "0"], "--port: a whole number from 1 to 65535, got '0'"),
        (["--port", "http"], "--port: a whole number from 1 to 65535, got 'http'"),
        (["--port"], "--port needs a value"),
        (["--timeout", "soon"], "--timeout: whole seconds, at least 1, got 'soon'"),
        (["--model", "/no/such/folder"], "model not found: no folder /no/such/folder"),
        (["--model", "/"], "model not found: no config.json in /"),
        (["--log", "/proc/no/log"], "cannot write the log /proc/no/log"),
    ],
)
def test_wrong_flags(machine: Machine, script: str, flags: list[str], words: str) -> None:
    done = machine.run(script, *flags)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_no_python_no_packaged_model(machine: Machine) -> None:
    done = machine.run(VLLM, LOADGEN_PYTHON="/no/python")
    assert done.returncode == 1 and "bash setup.sh makes the environment" in done.stderr
    done = machine.run(VLLM, FAKE_PACKAGED="missing")
    assert done.returncode == 1 and "bash setup.sh, or --model" in done.stderr


# ---------------------------------------------------------------- ready, and stopped


class Started:
    def __init__(self, machine: Machine, script: str, *flags: str, **environment: str) -> None:
        self.port = free_port()
        self.log = machine.home / "server.log"
        self.process = machine.start(script, "--port", str(self.port), "--log", str(self.log), *flags, **environment)
        self.pids = Path(machine.environment["FAKE_PIDS"])

    def server_pids(self) -> list[int]:
        return [int(word) for word in self.pids.read_text().split()]

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def start(machine: Machine) -> Iterator[object]:
    started: list[Started] = []

    def begin(script: str, *flags: str, **environment: str) -> Started:
        started.append(Started(machine, script, *flags, **environment))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
        for pid in one.server_pids() if one.pids.exists() else []:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "number"),
    [(VLLM, signal.SIGINT), (VLLM, signal.SIGTERM), (VLLM, signal.SIGHUP), (REFERENCE, signal.SIGTERM)],
)
def test_ready_then_stopped_with_all_of_its_processes(start, script: str, number: int) -> None:  # type: ignore[no-untyped-def]
    one = start(script)
    assert one.ready_line() == f"ready: http://127.0.0.1:{one.port} (log: {one.log})\n"
    pids = one.server_pids()
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    one.process.send_signal(number)
    out, err = one.process.communicate(timeout=60)
    assert one.process.returncode == 0
    assert out == "" and "stopping" in err
    assert "--port " + str(one.port) in err.splitlines()[0]  # the command that it ran
    assert not any(alive(pid) for pid in pids)


def test_stopped_before_it_is_ready(start) -> None:  # type: ignore[no-untyped-def]
    one = start(VLLM, FAKE_SERVER="hang:loading weights\n")
    while not one.log.exists() or not one.log.read_text():
        time.sleep(0.02)
        assert one.process.poll() is None
    one.process.send_signal(signal.SIGTERM)
    out, _ = one.process.communicate(timeout=60)
    assert one.process.returncode == 0
    assert out == ""


def test_killed_outright_the_server_ends_too(start) -> None:  # type: ignore[no-untyped-def]
    if subprocess.run(["setpriv", "--pdeathsig", "TERM", "true"], capture_output=True).returncode:
        pytest.skip("this setpriv has no --pdeathsig")
    one = start(VLLM)
    one.ready_line()
    server, _engine = one.server_pids()  # the engine is vLLM's to end; this one ignores it
    one.process.kill()
    one.process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server)


def test_the_port_is_in_use(machine: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = machine.run(VLLM, "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} is in use" in done.stderr
    assert "--port with another number" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_not_ready_in_time(start) -> None:  # type: ignore[no-untyped-def]
    one = start(VLLM, "--timeout", "1", FAKE_SERVER="hang:Loading weights: 12%\n")
    out, err = one.process.communicate(timeout=60)
    assert one.process.returncode == 1
    assert out == ""
    assert re.search(r"not ready within 1 s: .*Loading weights: 12%", err.splitlines()[-1])


def test_it_ends_by_itself_after_it_was_ready(start) -> None:  # type: ignore[no-untyped-def]
    one = start(VLLM, FAKE_SERVER="crash")
    out, err = one.process.communicate(timeout=60)
    assert one.process.returncode == 1
    # it may die before or after its answer to /health has been read
    assert "out of VRAM" in err.splitlines()[-1]
    assert not any(alive(pid) for pid in one.server_pids())


# ---------------------------------------------------------------- why it did not start

# What the programs really say, shortened; the line that the user gets must hold the words.
REASONS = [
    ("driver", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver is too old"),
    ("driver-runtime", "CUDA driver version is insufficient for CUDA runtime version", "driver is too old"),
    ("old-gpu", "RuntimeError: CUDA error: no kernel image is available for execution on the device", "GPU is too old"),
    (
        "bfloat16",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
        "--dtype half",
    ),
    ("libcuda", "ImportError: libcuda.so.1: cannot open shared object file: No such file", "setup.sh check"),
    (
        "vram-free",
        "ValueError: Free memory on device cuda:0 (5.1/8.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 7.2 GiB).",
        "out of VRAM",
    ),
    (
        "kv",
        "ValueError: To serve at least one request with the model's max seq len (131072), (14.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (2.1 GiB).",
        "--max-model-len",
    ),
    ("vram", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB.", "out of VRAM"),
    (
        "ram",
        "ValueError: Available memory on node 0 (3.1/16.0 GiB) on kv cache allocation is less than requested memory",
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    ("port", "OSError: [Errno 98] Address already in use", "--port with another number"),
    ("gated", "huggingface_hub.errors.GatedRepoError: 401 Client Error.", "HF_TOKEN"),
    (
        "no-model",
        "OSError: foo/bar is not a local folder and is not a valid model identifier listed on the hub",
        "model not found",
    ),
    ("offline", "OSError: We couldn't connect to 'https://hub' to load the files", "model not found"),
    (
        "too-long",
        "Value error, User-specified max_model_len (99999) is greater than the derived max_model_len (8192)",
        "a lower one; it said: is greater than the derived max_model_len (8192)",
    ),
    ("architecture", "ValueError: Model architectures ['Foo'] are not supported for now.", "another --model"),
    ("disk", "OSError: [Errno 28] No space left on device", "the disk is full"),
    ("compiler", "RuntimeError: Failed to find C compiler. Please specify via CC.", "build-essential"),
    ("headers", "main.c:5:10: fatal error: Python.h: No such file or directory", "python3-dev"),
    ("torchvision", "RuntimeError: operator torchvision::nms does not exist", "setup.sh repairs it"),
    ("package", "ModuleNotFoundError: No module named 'vllm'", "not installed: bash setup.sh"),
    ("worker-killed", "ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down", "killed"),
    ("engine-killed", "Failed core proc(s): {'EngineCore_DP0': -9}", "killed"),
    (
        "engine-vanished",
        "WARNING Found ulimit of 20000. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "killed",
    ),
    (
        "worker-error",
        "(VllmWorker-0 pid=7) ERROR AttributeError: no attribute 'init_cpu_memory_env'\n"
        + "  File\n" * 12000
        + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "status 1: (VllmWorker-0 pid=7) ERROR AttributeError: no attribute",
    ),
    (
        "libnuma",
        "WARNING Failed to import from vllm._C_AVX2: ImportError('libnuma.so.1: cannot open shared object file')",
        "sudo apt install libnuma1",
    ),
    ("flag", "api_server.py: error: unrecognized arguments: --foo", "unrecognized arguments: --foo"),
    (
        "other",
        "ERROR ValueError: no luck\nRuntimeError: Engine core initialization failed. See root cause above.",
        "status 1: ERROR ValueError: no luck",
    ),
    ("silent", "", "it said nothing"),
]


@pytest.mark.parametrize(("text", "words"), [row[1:] for row in REASONS], ids=[row[0] for row in REASONS])
def test_the_reason_in_one_line(machine: Machine, text: str, words: str) -> None:
    noise = "\x1b[32mINFO\x1b[0m loading\n"
    log = machine.home / "log"
    done = machine.run(
        VLLM, "--port", str(free_port()), "--log", str(log), FAKE_SERVER=f"end:{noise if text else ''}{text}\n"
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert words in last
    assert str(log) in last
    assert len(done.stderr.splitlines()) == 2  # the command, the reason


@pytest.mark.parametrize(("number", "words"), [(9, "killed, as the kernel does"), (4, "lacks an instruction")])
def test_the_reason_is_in_the_status(machine: Machine, number: int, words: str) -> None:
    done = machine.run(
        VLLM, "--port", str(free_port()), "--log", str(machine.home / "log"), FAKE_SERVER=f"kill{number}:"
    )
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def test_help_names_every_flag(machine: Machine) -> None:
    for script in (VLLM, REFERENCE):
        done = machine.run(script, "--help")
        assert done.returncode == 0
        for flag in (
            "--model",
            "--port",
            "--max-model-len",
            "--dtype",
            "--cpu",
            "--gpu",
            "--timeout",
            "--log",
            "--dry-run",
        ):
            assert flag in done.stdout
