"""`mvp export --gguf`: files for llama.cpp and Ollama, by llama.cpp's own converter.

The converter is a script of llama.cpp's repository. It is on PyPI only inside of the sources of llama-cpp-python.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from mvp_engine.errors import UserError

CONVERTER = "convert_hf_to_gguf.py"
GET = (
    "pip download llama-cpp-python --no-deps --no-binary :all: && tar xzf llama_cpp_python-*.tar.gz, then add "
    "--llama-cpp llama_cpp_python-VERSION/vendor/llama.cpp; or a clone of github.com/ggml-org/llama.cpp"
)
ENCODERS = ("vision_config", "audio_config")


def find_converter(llama_cpp: str | None) -> Path:
    if llama_cpp is None:
        raise UserError(f"mvp export --gguf needs llama.cpp's converter: {GET}")
    file = Path(llama_cpp).expanduser() / CONVERTER
    if not file.is_file():
        raise UserError(f"--llama-cpp {llama_cpp}: there is no {CONVERTER} in it. Get it by: {GET}")
    return file


def write_gguf(folder: Path, out: Path, kind: str, converter: Path, name: str) -> list[Path]:
    """Convert a Hugging Face folder into files below `out`: the model, and the encoders of one that has some."""
    if importlib.util.find_spec("sentencepiece") is None:
        raise UserError(
            "mvp export --gguf: the converter needs a package: pip install sentencepiece"
        )
    config = json.loads((folder / "config.json").read_text())
    parts: list[tuple[str, list[str]]] = [("", [])]
    if any(config.get(key) for key in ENCODERS):
        parts.append(("mmproj-", ["--mmproj"]))
    files = []
    out.mkdir(parents=True, exist_ok=True)
    for prefix, options in parts:
        file = out / f"{prefix}{name}-{kind}.gguf"
        if file.exists():
            raise UserError(f"{file} exists; choose another folder, or remove it")
        words = [str(folder), "--outfile", str(file), "--outtype", kind, "--model-name", name]
        command = [sys.executable, str(converter), *words, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            file.unlink(missing_ok=True)
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise UserError(
                f"llama.cpp's converter does not convert {config['architectures'][0]}: {' '.join(lines[-3:])[-800:]}"
            )
        files.append(file)
    return files
