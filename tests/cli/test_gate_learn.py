from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tests.cli.test_gates import audit, logits, repeats
from tests.diff.synthetic import FakeAudit, compare_all
from trace_audit.cli.main import run
from trace_audit.diff.learn import prediction_bound, rounded_up

Capture = pytest.CaptureFixture[str]
Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line on a synthetic audit."""

    def call(data: FakeAudit, *arguments: str) -> int:
        module = SimpleNamespace(AuditDir=SimpleNamespace(open=lambda path: data))
        monkeypatch.setitem(sys.modules, "trace_audit.storage.audit_dir", module)
        return run(list(arguments))

    return call


def good_runs() -> FakeAudit:
    return audit(a=logits(0.1, 1), b=logits(0.1, 2), c=logits(0.1, 3), bad=logits(0.5, 4))


LEARN = ("--run", "a", "--run", "b", "--run", "c")


def test_learned_bounds_pass_good_runs_and_fail_a_bad_one(
    command: Command, capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    assert command(good_runs(), "gate", "learn", "x", "-o", str(path), *LEARN) == 0
    printed = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    document = tomllib.loads(path.read_text())
    assert {g["metric"]: g["bound"] for g in document["gate"]} == {
        name: float(bound) for name, bound in printed.items()
    }
    assert document["runs"] == ["a", "b", "c"]
    report = ["diff", "report", "x", "--no-save", "--profile", str(path)]
    for name, code in (("a", 0), ("b", 0), ("c", 0), ("bad", 1)):
        assert command(good_runs(), *report, "--candidate", name) == code
    assert "profile learned" in capsys.readouterr().out


def test_a_bound_is_the_prediction_of_one_more_upper_bound(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    command(good_runs(), "gate", "learn", "x", "-o", str(path), *LEARN, "--metric", "abs.mean")
    (gate,) = tomllib.loads(path.read_text())["gate"]
    summary, _ = compare_all(good_runs(), "record", ["a", "b", "c"])
    uppers = [pair.metric("abs.mean").interval.high for pair in summary.pairs]  # type: ignore[union-attr]
    t = float(stats.t.ppf(0.975, 2))
    expected = np.mean(uppers) + t * np.std(uppers, ddof=1) * np.sqrt(4 / 3)
    assert prediction_bound(uppers) == pytest.approx(expected)
    assert gate["bound"] == rounded_up(max(*uppers, prediction_bound(uppers)))


def test_runs_of_the_same_numbers_are_one_run(
    command: Command, capsys: Capture, tmp_path: Path
) -> None:
    """Two configurations that are equal bit for bit say nothing of the spread between good runs."""
    path = tmp_path / "mine.toml"
    twins = audit(a=logits(0.1, 1), again=logits(0.1, 1), b=logits(0.1, 2))
    learn = ("gate", "learn", "x", "-o", str(path), "--run", "a", "--run", "again")
    assert command(twins, *learn) == 2
    assert "again is left out: its numbers are those of a" in capsys.readouterr().err
    assert command(twins, *learn, "--run", "b") == 0
    assert tomllib.loads(path.read_text())["runs"] == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 0.0), (0.001, 0.00101), (0.25, 0.25), (0.2501, 0.251), (1234.5, 1240.0), (2e-9, 2e-9)],
)
def test_bounds_are_rounded_up_to_three_digits(value: float, expected: float) -> None:
    # 0.001 is stored a little over itself in binary; a bound must not be under the value.
    assert rounded_up(value) == pytest.approx(expected, rel=6e-3)
    assert rounded_up(value) >= value
    assert rounded_up(value) <= value * 1.0101


def test_repeats_and_equal_runs_are_left_out(
    command: Command, capsys: Capture, tmp_path: Path
) -> None:
    data = audit(a=logits(0.1, 1), a2=logits(0.1, 2), b=logits(0.1, 3), same=logits(0))
    repeats(data, "a2", "a")
    path = tmp_path / "mine.toml"
    assert command(data, "gate", "learn", "x", "-o", str(path)) == 0
    assert tomllib.loads(path.read_text())["runs"] == ["a", "b"]
    err = capsys.readouterr().err
    assert "a2 is left out: it repeats a" in err
    assert "same is left out: it equals record bit for bit" in err
    assert "no bound on kl.excess" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "a"], "only 'a'"),
        (["--metric", "abs.max"], "cannot be gated"),
        (["--metric", "abs.maen"], "'abs.mean'"),
        (["--metric", "abs.p99_9"], "No metric gives a bound"),
    ],
)
def test_mistakes(
    command: Command, capsys: Capture, tmp_path: Path, arguments: list[str], said: str
) -> None:
    path = tmp_path / "mine.toml"
    assert command(good_runs(), "gate", "learn", "x", "-o", str(path), *arguments) == 2
    assert said in capsys.readouterr().err
    assert not path.exists()


def test_a_file_is_not_replaced_unless_forced(
    command: Command, capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    arguments = ["gate", "learn", "x", "-o", str(path), *LEARN]
    assert command(good_runs(), *arguments) == 2
    assert path.read_text() == "mine"
    assert command(good_runs(), *arguments, "--force") == 0
    assert path.read_text() != "mine"


HEAD = 'format = "trace-audit profile"\nformat_version = 1\nname = "x"\n'
GATE = '[[gate]]\nmetric = "kl.mean"\nbound = 1\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no profile"),
        ("a = ", "no TOML"),
        (HEAD.replace("1", "2") + GATE, "version 1"),
        (HEAD, "at least one"),
        (HEAD + "purpos = 'y'\n" + GATE, "'purpose'"),
        (HEAD + GATE.replace("bound", "bond"), "'bound'"),
        (HEAD + GATE.replace("1", "'1'"), "type float"),
        (HEAD + GATE.replace("1", "true"), "type float"),
        (HEAD + GATE.replace("1", "-1"), "not negative"),
        (HEAD + GATE.replace("1", "inf"), "finite"),
        (HEAD + GATE.replace("kl.mean", "kl.maen"), "'kl.mean'"),
        (HEAD + GATE.replace("kl.mean", "abs.max"), "cannot be gated"),
        (HEAD + "gate = [1]\n", "table"),
    ],
)
def test_a_wrong_profile_file_exits_2(
    command: Command, capsys: Capture, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert command(good_runs(), "diff", "report", "x", "--no-save", "--profile", str(path)) == 2
    assert said in capsys.readouterr().err


def test_a_profile_file_that_is_missing_exits_2(command: Command, tmp_path: Path) -> None:
    arguments = ["diff", "report", "x", "--profile", str(tmp_path / "none.toml")]
    assert command(good_runs(), *arguments) == 2


def test_a_profile_of_another_model_is_told(
    command: Command, capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + 'model_fingerprint = "other"\n' + GATE)
    arguments = ["diff", "report", "x", "--no-save", "--candidate", "a", "--profile", str(path)]
    assert command(good_runs(), *arguments) == 0
    assert "learned on another model" in capsys.readouterr().err
