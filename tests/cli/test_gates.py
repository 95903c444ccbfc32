"""Every verdict's exit code, from a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.diff.synthetic import FakeAudit, Logits, model_audit, run_info
from trace_audit.cli.main import run

LENGTH = 32
Report = Callable[..., int]


def logits(sigma: float, seed: int = 0) -> Logits:
    record = np.random.default_rng(0).normal(0, 2.5, (8 * LENGTH, 60))
    noise = np.random.default_rng(100 + seed).normal(0, 1.0, record.shape)
    return record + sigma * noise


def audit(**runs: Logits) -> FakeAudit:
    """A float32 record; every other run says that it is bfloat16."""
    data = model_audit({"record": logits(0), **runs}, length=LENGTH)
    for name in runs:
        data.infos[name] = run_info(name, dtype="bfloat16")
    return data


def repeats(data: FakeAudit, name: str, of: str, kind: str = "rerun") -> None:
    data.infos[name] |= {"repeat_of": of, "repeat_kind": kind}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Report:
    """Runs `diff report` on a synthetic audit."""

    def call(data: FakeAudit, *arguments: str) -> int:
        data.path = tmp_path
        module = SimpleNamespace(AuditDir=SimpleNamespace(open=lambda path: data))
        monkeypatch.setitem(sys.modules, "trace_audit.storage.audit_dir", module)
        return run(["diff", "report", str(tmp_path), "--no-save", *arguments])

    return call


Capture = pytest.CaptureFixture[str]


def test_0_pass(report: Report, capsys: Capture) -> None:
    assert report(audit(b=logits(0.05)), "--profile", "w8") == 0
    out = capsys.readouterr().out
    assert "PASS WITHIN-BOUND  b against record, profile w8." in out
    assert "No floor was measured" in out


def test_0_bitwise(report: Report, capsys: Capture) -> None:
    assert report(audit(b=logits(0)), "--profile", "bitwise") == 0
    assert "PASS BITWISE" in capsys.readouterr().out


def test_0_within_floor(report: Report, capsys: Capture) -> None:
    data = audit(b=logits(0.05), c=logits(0.05, 1), d=logits(0.05, 2))
    repeats(data, "c", "b")
    repeats(data, "d", "b")
    arguments = ["--baseline", "b", "--candidate", "c", "--profile", "w8", "--require-floor"]
    assert report(data, *arguments) == 0
    out = capsys.readouterr().out
    assert "PASS WITHIN-FLOOR  c against b" in out
    assert "Floor: rerun of b, 3 runs, 2 pairs" in out


def test_1_fail_with_the_bound_that_would_have_passed(report: Report, capsys: Capture) -> None:
    assert report(audit(b=logits(0.5)), "--fail-on", "kl.mean > 1e-4") == 1
    captured = capsys.readouterr()
    assert "FAIL  b against record." in captured.out
    assert "passes from" in captured.out
    row = next(line for line in captured.out.splitlines() if line.startswith("  kl.mean"))
    printed = float(row.split()[-2])
    assert report(audit(b=logits(0.5)), "--fail-on", f"kl.mean > {printed}") == 0


def test_1_one_changed_bit_fails_bitwise(report: Report, capsys: Capture) -> None:
    changed = logits(0)
    changed[40, 59] = np.nextafter(np.float32(changed[40, 59]), np.float32(9))
    assert report(audit(b=changed), "--profile", "bitwise") == 1
    assert "1 of 256 rows" in capsys.readouterr().out


def test_1_a_non_finite_candidate_fails(report: Report) -> None:
    data = audit(b=logits(0.01))
    values = data.tables["b"]["logprob"].to_numpy().copy()
    values[5] = np.nan
    index = data.tables["b"].schema.get_field_index("logprob")
    field = data.tables["b"].schema.field(index)
    data.tables["b"] = data.tables["b"].set_column(index, field, [values])
    assert report(data, "--profile", "w8") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "kernle"], "'kernel'"),
        (["--profile", "rl"], "greedy"),
        (["--fail-on", "kl.maen > 1"], "'kl.mean'"),
        (["--fail-on", "kl.mean > 1 nat"], "'nats'"),
        (["--inconclusive", "fail"], "--inconclusive has nothing"),
        (["--require-floor"], "--require-floor has nothing"),
    ],
)
def test_2_usage(report: Report, capsys: Capture, arguments: list[str], said: str) -> None:
    assert report(audit(b=logits(0.1)), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_3_inconclusive_says_how_many_sequences_would_decide(
    report: Report, capsys: Capture
) -> None:
    arguments = ["--fail-on", "flip.hard > 0.01%"]
    assert report(audit(b=logits(0.01)), *arguments) == 3
    assert "sequences like these 8 would decide" in capsys.readouterr().out
    assert report(audit(b=logits(0.01)), *arguments, "--inconclusive", "fail") == 1
    assert report(audit(b=logits(0.01)), *arguments, "--inconclusive", "pass") == 0
    assert "INCONCLUSIVE  b against record" in capsys.readouterr().out


def test_3_a_quantile_without_an_upper_bound(report: Report, capsys: Capture) -> None:
    assert report(audit(b=logits(0.01)), "--fail-on", "abs.p99 > 1") == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "too few tokens for an upper bound of the quantile; about" in out
    assert "would give one" in out
    # Where the lower bound is over the threshold, no upper bound is needed.
    assert report(audit(b=logits(0.5)), "--fail-on", "abs.p99 > 1e-3") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "w8", "--require-floor"], "no floor was measured"),
        (["--fail-on", "abs.p99 > 3*floor"], "no floor was measured"),
        (["--profile", "kernel"], "the baseline is record itself"),
        (["--fail-on", "abs.p99_9 > 1"], "under 10,000 effective tokens"),
    ],
)
def test_4_invalid(report: Report, capsys: Capture, arguments: list[str], said: str) -> None:
    assert report(audit(b=logits(0.1)), *arguments) == 4
    captured = capsys.readouterr()
    assert "INVALID  b against record" in captured.out
    assert said in captured.err


def test_4_goes_before_1(report: Report) -> None:
    arguments = ["--fail-on", "kl.mean > 1e-9", "--fail-on", "abs.p99 > 3*floor"]
    assert report(audit(b=logits(0.1)), *arguments) == 4


def test_without_gates_the_report_exits_0_or_4(report: Report) -> None:
    assert report(audit(b=logits(0.9))) == 0
    broken = audit(b=logits(0.9), c=logits(0.1))
    broken.tables["c"] = broken.tables["c"].slice(1)
    assert report(broken) == 4


def test_kernel_compares_two_distances_from_the_record(report: Report, capsys: Capture) -> None:
    data = audit(base=logits(0.1, 1), good=logits(0.1, 2), bad=logits(0.2, 3))
    for name, code in (("good", 0), ("bad", 1)):
        arguments = ["--baseline", "base", "--candidate", name, "--profile", "kernel"]
        assert report(data, *arguments) == code
        assert "(watched)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run_name", "dtype", "said"),
    [
        ("record", "bfloat16", "float32 record"),
        ("base", "float16", "float16 and bfloat16"),
    ],
)
def test_kernel_refuses_other_dtypes(
    report: Report, capsys: Capture, run_name: str, dtype: str, said: str
) -> None:
    data = audit(base=logits(0.1, 1), good=logits(0.1, 2))
    data.infos[run_name] = run_info(run_name, dtype=dtype)
    arguments = ["--baseline", "base", "--candidate", "good", "--profile", "kernel"]
    assert report(data, *arguments) == 4
    assert said in capsys.readouterr().err


def test_several_candidates_end_with_the_worst(report: Report, capsys: Capture) -> None:
    data = audit(good=logits(0.01), bad=logits(0.9))
    assert report(data, "--profile", "w8") == 1
    grid = capsys.readouterr().out
    assert "verdict" in grid
    assert "PASS WITHIN-BOUND" in grid
    assert "FAIL" in grid


@pytest.mark.parametrize("layout", ["json", "markdown"])
def test_every_format_has_the_verdict(report: Report, capsys: Capture, layout: str) -> None:
    assert report(audit(b=logits(0.5)), "--profile", "w8", "--format", layout) == 1
    out = capsys.readouterr().out
    assert ("### FAIL" in out) if layout == "markdown" else ('"outcome": "fail"' in out)


def test_a_report_in_a_file_leaves_the_verdict_on_standard_error(
    report: Report, capsys: Capture, tmp_path: Path
) -> None:
    arguments = ["--profile", "w8", "--output", str(tmp_path / "report.txt")]
    assert report(audit(b=logits(0.5)), *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "FAIL  b against record, profile w8.\n"


def rollout(trainer: Logits) -> FakeAudit:
    """An imported trace: the rollout's logprobs are the run `imported`."""
    data = model_audit({"record": trainer, "imported": logits(0)}, length=LENGTH, source="imported")
    data.sampling = {}
    return data


@pytest.mark.parametrize(("sigma", "code"), [(0.005, 0), (0.5, 1)])
def test_rl_compares_with_the_rollout(
    report: Report, capsys: Capture, sigma: float, code: int
) -> None:
    assert report(rollout(logits(sigma)), "--profile", "rl") == code
    out = capsys.readouterr().out
    assert "record against imported, profile rl" in out
    assert "ESS / N" in out
    assert "Importance ratio, candidate over baseline" in out


def test_a_report_on_a_rollout_leads_to_its_verdict(report: Report, capsys: Capture) -> None:
    assert report(rollout(logits(0.005))) == 0
    assert "--profile rl" in capsys.readouterr().out


def test_rl_is_invalid_where_the_baseline_did_not_sample(report: Report, capsys: Capture) -> None:
    arguments = ["--baseline", "record", "--candidate", "imported", "--profile", "rl"]
    assert report(rollout(logits(0.01)), *arguments) == 4
    assert "not sampled from record" in capsys.readouterr().err
