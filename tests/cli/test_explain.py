from __future__ import annotations

import subprocess
import sys

import pytest

from trace_audit.cli.main import run
from trace_audit.diff.catalog import CATALOG

Capture = pytest.CaptureFixture[str]


def test_without_a_metric_all_are_listed(capsys: Capture) -> None:
    assert run(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["metric", *CATALOG]


@pytest.mark.parametrize("name", CATALOG)
def test_every_metric_says_what_it_is(name: str, capsys: Capture) -> None:
    assert run(["explain", name]) == 0
    out = capsys.readouterr().out
    info = CATALOG[name]
    for text in (info.formula, info.unit, info.valid, info.source, "candidate is more confident"):
        assert text in out
    assert ("refused" in out) is (info.not_gated is not None)


def test_profiles_are_named(capsys: Capture) -> None:
    run(["explain", "kl.mean"])
    assert "w8 over 0.005" in capsys.readouterr().out


def test_an_unknown_metric_gives_the_nearest(capsys: Capture) -> None:
    assert run(["explain", "kl.maen"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'kl.mean'" in captured.err


def test_it_loads_no_torch() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from trace_audit.cli.main import run\nassert run(['explain', 'tme']) == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
