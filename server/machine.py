"""What this machine can do for a model: the dtype that is fast here, and the memory bandwidth a decode step may have.

    python -m server.machine [--device auto|cpu|cuda] [--model FOLDER]
    {"device": "cpu", "dtype": "float32", "bytes_per_s": 1.1e+10, "runs": [...]}

dtype: as the model is saved, but float32 where this CPU multiplies 16-bit numbers more slowly: without AVX-512 or AMX
torch converts them one by one, 10 to 50 times slower. A reference in such a dtype would make any factor cheap.
Bandwidth: reading a tensor far larger than the caches once, as a decode step does with its weights; the best run is
what the memory can do. All cores that torch uses, or one GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

_RUNS = 9
_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
_HALF = (torch.bfloat16, torch.float16)
_WORTH_IT = 1.3  # times faster that float32 must be: it doubles the bytes of weights and KV


def device_of(name: str) -> str:
    """auto: the GPU where torch sees one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def fast_dtype(saved: torch.dtype, device: str) -> torch.dtype:
    """`saved`, or float32 where that is clearly faster on this CPU (measured, about 0.1 s)."""
    if device != "cpu" or saved not in _HALF:
        return saved
    return torch.float32 if _product_s(saved) > _WORTH_IT * _product_s(torch.float32) else saved


def _product_s(dtype: torch.dtype) -> float:
    """Seconds of a batch of 8 through a 1024 x 1024 layer: the least of 5."""
    x, weights = torch.ones(8, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        x @ weights
        best = min(best, time.perf_counter() - begin)
    return best


def saved_dtype(config: Any) -> torch.dtype:
    """The dtype that a model's config names; float32 where it names none, as transformers takes it."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def bandwidth(device: str) -> list[float]:
    """bytes/s of some reads, after one that is not counted."""
    values = torch.ones(_BYTES[device] // 4, dtype=torch.float32, device=device)
    rates = []
    for run in range(_RUNS + 1):
        begin = time.perf_counter()
        values.sum().item()  # item waits for a GPU
        if run:
            rates.append(_BYTES[device] / (time.perf_counter() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m server.machine", description="fast dtype, memory bandwidth")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model", help="folder or hub name: its saved dtype decides [default: bfloat16]")
    args = parser.parse_args()
    device, saved = device_of(args.device), torch.bfloat16
    if args.model is not None:
        from transformers import AutoConfig

        saved = saved_dtype(AutoConfig.from_pretrained(args.model).get_text_config())
    rates = bandwidth(device)
    dtype = str(fast_dtype(saved, device)).removeprefix("torch.")
    print(json.dumps({"device": device, "dtype": dtype, "bytes_per_s": max(rates), "runs": rates}))


if __name__ == "__main__":
    main()
