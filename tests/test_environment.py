"""The environment says what can change numerics, and nothing about who runs it where."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trace_audit import environment
from trace_audit.config import EngineConfig, RunConfig
from trace_audit.environment import environment_fingerprint, environment_info
from trace_audit.run_setup import run_environment


def test_it_is_json_and_names_the_libraries() -> None:
    info = json.loads(json.dumps(environment_info(), allow_nan=False))
    assert info["machine"] == platform.machine()
    assert info["versions"]["numpy"]
    assert info["versions"]["trace_audit"]
    assert info["cpu_count"] >= 1
    assert info["cpu_model"]


def test_no_host_name_and_no_path() -> None:
    text = json.dumps(environment_info())
    assert platform.node() not in text
    assert str(Path.home()) + "/" not in text
    assert sys.prefix not in text


def test_an_absent_package_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PACKAGES", ("numpy", "no-such-package-here"))
    versions = environment_info()["versions"]
    assert isinstance(versions, dict)
    assert versions["no-such-package-here"] is None


def test_a_machine_without_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_CPU_INFO", tmp_path / "none")
    info = environment_info()
    assert info["cpu_flags"] == []
    assert info["cpu_model"]


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        (
            "processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nflags\t\t: fpu avx2 amx_bf16\n\n"
            "processor\t: 1\nmodel name\t: Other\n",
            "Some CPU @ 2.00GHz",
            ["avx2", "amx_bf16"],
        ),
        ("processor\t: 0\nFeatures\t: fp asimd sve\n", None, ["asimd", "sve"]),
    ],
)
def test_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, model: str | None, flags: list[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(environment, "_CPU_INFO", tmp_path / "cpuinfo")
    info = environment_info()
    assert info["cpu_flags"] == flags
    assert info["cpu_model"] == model or model is None


@pytest.mark.parametrize(
    ("key", "value", "counts"),
    [
        ("cpu_model", "another", True),
        ("cpu_flags", ["another"], True),
        ("machine", "another", True),
        ("versions", {"torch": "0"}, True),
        ("variables", {"NVIDIA_TF32_OVERRIDE": "1"}, True),
        ("gpu_name", "another", True),
        ("python", "3.99.0", False),
        ("platform", "another", False),
        ("cpu_count", 999, False),
    ],
)
def test_what_the_fingerprint_covers(key: str, value: object, counts: bool) -> None:
    info = environment_info()
    changed = environment_fingerprint({**info, key: value})
    assert (changed != environment_fingerprint(info)) == counts


def test_each_package_that_computes_counts() -> None:
    info = environment_info()
    versions = info["versions"]
    assert isinstance(versions, dict)
    for name in versions:
        changed = {**info, "versions": {**versions, name: "0.0.0"}}
        same = environment_fingerprint(changed) == environment_fingerprint(info)
        assert same == (name in {"pyarrow", "safetensors"}), name


def test_the_order_of_keys_does_not_count() -> None:
    info = environment_info()
    backwards = dict(reversed(info.items()))
    assert environment_fingerprint(backwards) == environment_fingerprint(info)


def test_variables_that_change_numerics_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("UNRELATED", "secret")
    variables = environment_info()["variables"]
    assert isinstance(variables, dict)
    assert variables["MKL_CBWR"] == "COMPATIBLE"
    assert "UNRELATED" not in variables


_IMPORTS = """
import sys
import trace_audit.environment, trace_audit.text, trace_audit.tokenizer
import trace_audit.storage.audit_dir, trace_audit.storage.record_writer
import trace_audit.storage.run_writer, trace_audit.storage.prompts, trace_audit.storage.imported
import trace_audit.storage.fingerprint
trace_audit.environment.environment_info()
print([m for m in ("torch", "transformers", "triton", "safetensors") if m in sys.modules])
"""


def test_nothing_here_imports_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_run_names_the_torch_that_runs_where_its_package_says_less(monkeypatch) -> None:
    monkeypatch.setattr(environment.metadata, "version", lambda name: "2.11.0")
    assert environment_info()["versions"]["torch"] == "2.11.0"
    config = RunConfig(name="x", engine=EngineConfig(device="cpu"))
    assert run_environment(config)["versions"]["torch"] == torch.__version__
