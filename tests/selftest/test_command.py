"""`trace-audit selftest` as a user runs it, and that a broken tool does not pass it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import command, run
from trace_audit.cli import main
from trace_audit.cli import selftest as selftest_command
from trace_audit.diff import compare, kl_totals, pair_structure, run_rows
from trace_audit.diff.pattern import Onset

pytestmark = pytest.mark.timeout(900)

CONTROLS = ["logit noise", "shifted tokens", "swapped keys", "A/A", "one unit", "batch 1"]
HELD = CONTROLS[:-1]
SETTINGS = ["--set", "device=cpu", "--set", "num_threads=1"]


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command's end and what it kept."""
    directory = tmp_path_factory.mktemp("selftest") / "kept"
    done = subprocess.run(
        command("selftest", "--model", model, "--keep", directory, *SETTINGS),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=800,
        check=False,
    )
    return done, directory


@pytest.fixture
def judge_again(kept, tmp_path, monkeypatch, capsys) -> Any:
    """Runs the command on the runs that are there: exit code, outcomes by control, stderr."""
    directory = Path(shutil.copytree(kept[1], tmp_path / "kept"))
    shutil.rmtree(directory / "audit" / "runs" / "shifted")

    @contextmanager
    def there(keep: Path | None) -> Iterator[Path]:
        yield directory

    monkeypatch.setattr(selftest_command, "_directory", there)
    monkeypatch.setattr(selftest_command, "_run", lambda job, target: None)

    def judge() -> tuple[int, dict[str, str], str]:
        code = main.run(["selftest", "--model", "unused"])
        captured = capsys.readouterr()
        lines = [line.split("\t") for line in captured.out.splitlines()]
        assert [len(line) for line in lines] == [5] * len(CONTROLS)
        return code, {line[1]: line[0] for line in lines}, captured.err

    return judge


def test_every_control_holds_on_a_sound_tool(kept):
    done, directory = kept
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[1] for line in lines] == CONTROLS
    assert [line[0] for line in lines] == ["ok"] * len(HELD) + ["reported"]
    assert all(len(line) == 5 and all(line) for line in lines)
    assert "swapped: replaying" in done.stderr
    listed = run("ls", directory / "audit").stdout
    assert all(name in listed for name in ("again", "noise", "swapped", "unit", "alone"))


def test_judged_again_the_runs_give_the_same_findings(judge_again):
    code, outcomes, _ = judge_again()
    assert code == 0
    assert set(outcomes.values()) == {"ok", "reported"}


def with_unequal(monkeypatch: pytest.MonkeyPatch, unequal: Callable[[Any], Any]) -> None:
    """The comparison takes other rows for unequal than those that are."""
    read = compare.reduced

    def wrong(*arguments: Any, **options: Any) -> Any:
        pair = read(*arguments, **options)
        return replace(pair, unequal=unequal(pair))

    monkeypatch.setattr(compare, "reduced", wrong)


def blind_to_bits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No row is ever unequal."""
    with_unequal(monkeypatch, lambda pair: np.zeros(len(pair), dtype=bool))
    return ["logit noise", "swapped keys", "one unit"]


def compares_logprobs_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Equal logprobs pass for equal logits."""
    with_unequal(monkeypatch, lambda pair: pair.delta != 0)
    return ["one unit"]


def sees_differences_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Equal rows pass for unequal."""
    with_unequal(monkeypatch, lambda pair: np.ones(len(pair), dtype=bool))
    return ["swapped keys", "A/A", "one unit"]


def ignores_token_ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids are stored and never compared."""
    monkeypatch.setattr(run_rows._Location, "_contents", lambda *arguments: None)
    return ["shifted tokens"]


def kl_a_third_too_small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An estimator with a bias."""
    estimate = kl_totals.fixed_support_kl

    def biased(*arguments: Any, **options: Any) -> Any:
        terms = estimate(*arguments, **options)
        return replace(terms, estimate=terms.estimate * 2 / 3)

    monkeypatch.setattr(kl_totals, "fixed_support_kl", biased)
    return ["logit noise"]


def misses_some_flips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flips of one sequence are not counted."""
    find = compare.top_changes

    def partly(pair: Any, **options: Any) -> Any:
        changes = find(pair, **options)
        return replace(changes, flip=changes.flip & (pair.sequence != 3))

    monkeypatch.setattr(compare, "top_changes", partly)
    return ["logit noise"]


def onset_one_late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An onset that is off by one."""
    find = pair_structure.onset

    def late(*arguments: Any) -> Onset | None:
        onset = find(*arguments)
        return None if onset is None else replace(onset, position=onset.position + 1)

    monkeypatch.setattr(pair_structure, "onset", late)
    return ["swapped keys"]


@pytest.mark.parametrize(
    "break_it",
    [
        blind_to_bits,
        compares_logprobs_alone,
        sees_differences_everywhere,
        ignores_token_ids,
        kl_a_third_too_small,
        misses_some_flips,
        onset_one_late,
    ],
)
def test_a_broken_tool_fails(judge_again, monkeypatch, break_it):
    expected = break_it(monkeypatch)
    code, outcomes, stderr = judge_again()
    assert code == 1
    assert [name for name in HELD if outcomes[name] == "FAILED"] == expected
    assert f"{len(expected)} of the controls failed" in stderr
    assert "no verdict from this machine can be trusted" in stderr


def test_keep_names_a_new_directory(tmp_path):
    (tmp_path / "mine").mkdir()
    done = run("selftest", "--keep", tmp_path / "mine", code=2)
    assert "hint:" in done.stderr
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dtype=bfloat16", "selftest does not change engine.dtype"),
        ("tensor_parallel_size=2", "selftest does not change parallel.tensor_parallel_size"),
        ("num_threads=1,2", "several values"),
    ],
)
def test_a_setting_that_the_controls_do_not_hold_for_is_refused(tmp_path, setting, message):
    done = run("selftest", "--keep", tmp_path / "new", "--set", setting, code=2)
    assert message in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_model_that_is_not_there_is_a_mistake_of_the_user(tmp_path):
    done = run("selftest", "--model", tmp_path / "none", "--keep", tmp_path / "new", code=2)
    assert "does not exist" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_every_control_holds_on_cuda(model, backend):
    settings = ["--set", "device=cuda", "--set", f"attention_backend={backend}"]
    done = run("selftest", "--model", model, *settings)
    assert done.stdout.count("ok\t") == len(HELD)
