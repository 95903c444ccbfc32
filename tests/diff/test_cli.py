from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from tests.diff.synthetic import FakeAudit
from tests.diff.test_compare import audit, logits
from trace_audit.cli.diff import diff
from trace_audit.errors import InvalidComparisonError, UsageError

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Runs `diff ...` on a synthetic audit; {dir} in an argument is its directory."""

    def run(data: FakeAudit, *arguments: str, charset: str = "utf-8") -> Result:
        data.path = tmp_path
        opened = SimpleNamespace(open=lambda path: data)
        module = SimpleNamespace(AuditDir=opened)
        monkeypatch.setitem(sys.modules, "trace_audit.storage.audit_dir", module)
        filled = [argument.replace("{dir}", str(tmp_path)) for argument in arguments]
        return CliRunner(charset=charset).invoke(diff, filled)

    return run


def broken_audit() -> FakeAudit:
    data = audit(broken=logits(0.1))
    data.tables["broken"] = data.tables["broken"].slice(1)
    return data


def test_report_goes_to_standard_output_and_saves_the_diffs(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke(audit(), "report", "{dir}")
    assert result.exit_code == 0, result.output
    assert "noisy against record" in result.stdout
    assert "\x1b" not in result.stdout
    table = pq.read_table(tmp_path / "diffs" / "noisy-vs-record.parquet")
    assert table.num_rows == 256
    document = json.loads((tmp_path / "diffs" / "noisy-vs-record.json").read_text())
    assert document["pairs"][0]["candidate"]["name"] == "noisy"


def test_no_save_leaves_the_audit_alone(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke(audit(), "report", "{dir}", "--no-save").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_every_other_run_is_a_candidate_by_default(invoke: Invoke) -> None:
    result = invoke(audit(third=logits(0.3)), "report", "{dir}", "--format", "json", "--no-save")
    names = [pair["candidate"]["name"] for pair in json.loads(result.stdout)["pairs"]]
    assert sorted(names) == ["noisy", "third"]


def test_candidates_and_baseline_can_be_named(invoke: Invoke) -> None:
    arguments = ["--baseline", "third", "--candidate", "noisy", "--format", "json", "--no-save"]
    result = invoke(audit(third=logits(0.3)), "report", "{dir}", *arguments)
    document = json.loads(result.stdout)
    assert document["baseline"] == "third"
    assert [pair["candidate"]["name"] for pair in document["pairs"]] == ["noisy"]


def test_output_goes_to_a_file(invoke: Invoke, tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    arguments = ["--format", "markdown", "--output", str(target), "--no-save"]
    result = invoke(audit(), "report", "{dir}", *arguments)
    assert result.stdout == ""
    assert target.read_text(encoding="utf-8").startswith("## trace-audit diff report")


def test_html_shows_as_many_sequences_as_asked_for(invoke: Invoke, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    arguments = ["--format", "html", "--output", str(target), "--no-save", "--html-sequences"]
    result = invoke(audit(), "report", "{dir}", *arguments, "2")
    assert result.exit_code == 0, result.output
    text = target.read_text(encoding="ascii")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<article>") == 2
    assert "6 other sequences not shown" in text


def test_a_number_of_html_sequences_needs_html(invoke: Invoke) -> None:
    result = invoke(audit(), "report", "{dir}", "--no-save", "--html-sequences", "2")
    assert isinstance(result.exception, UsageError)
    assert "--format html" in result.exception.message


def test_an_output_that_cannot_be_written_is_a_usage_error(invoke: Invoke) -> None:
    result = invoke(audit(), "report", "{dir}", "--no-save", "--output", "{dir}/missing/file")
    assert isinstance(result.exception, UsageError)


def test_an_invalid_candidate_exits_4_after_the_report_of_the_others(invoke: Invoke) -> None:
    result = invoke(broken_audit(), "report", "{dir}", "--no-save")
    assert "noisy against record" in result.stdout
    assert "INVALID  broken" in result.stdout
    assert isinstance(result.exception, InvalidComparisonError)
    assert result.exception.exit_code == 4
    assert "1 of 2 candidates" in result.exception.message


@pytest.mark.parametrize("how", ["empty", "disjoint", "shifted", "nan baseline"])
def test_vacuous_and_wrong_comparisons_never_pass(invoke: Invoke, how: str) -> None:
    data = audit()
    name = "record" if how == "nan baseline" else "noisy"
    table = data.tables[name]
    if how == "empty":
        table = table.slice(0, 0)
    elif how == "disjoint":
        table = with_column(table, "sequence_index", np.full(len(table), 77, dtype=np.int32))
    elif how == "shifted":
        table = with_column(table, "token_id", np.roll(table["token_id"].to_numpy(), 1))
    else:
        table = with_column(table, "logprob", np.full(len(table), np.nan, dtype=np.float32))
    data.tables[name] = table
    result = invoke(data, "report", "{dir}", "--no-save")
    assert isinstance(result.exception, InvalidComparisonError)
    assert result.stdout == ""


def with_column(table: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), [values])


def test_an_audit_with_only_its_record_has_nothing_to_compare(invoke: Invoke) -> None:
    data = audit()
    del data.tables["noisy"]
    result = invoke(data, "report", "{dir}")
    assert isinstance(result.exception, UsageError)
    assert result.exception.hint is not None
    assert "replay" in result.exception.hint


def test_show_prints_the_worst_tokens(invoke: Invoke) -> None:
    result = invoke(audit(), "show", "{dir}", "--candidate", "noisy", "--worst", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("delta ") == 4
    assert "baseline's best" in result.stdout


def test_show_prints_one_token(invoke: Invoke) -> None:
    arguments = ["--candidate", "noisy", "--sequence", "s2", "--step", "7"]
    result = invoke(audit(), "show", "{dir}", *arguments)
    assert result.exit_code == 0, result.output
    assert "position 12 (sequence s2, step 7)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence", "s2"], "go together"),
        (["--step", "2"], "go together"),
        (["--sequence", "s2", "--step", "2", "--worst", "3"], "cannot be combined"),
        (["--sequence", "zz", "--step", "2"], "no sequence 'zz'"),
        (["--sequence", "s2", "--step", "32"], "no scored and compared token at step 32"),
    ],
)
def test_show_refuses_what_names_no_token(
    invoke: Invoke, arguments: list[str], message: str
) -> None:
    result = invoke(audit(), "show", "{dir}", "--candidate", "noisy", *arguments)
    assert isinstance(result.exception, UsageError)
    assert message in result.exception.message


def test_a_narrow_encoding_shows_escapes_and_does_not_fail(invoke: Invoke) -> None:
    data = audit()
    data.texts = dict.fromkeys(range(60), "é漢".encode())
    arguments = ["--candidate", "noisy", "--worst", "1"]
    result = invoke(data, "show", "{dir}", *arguments, charset="ascii")
    assert result.exit_code == 0, result.output
    assert "\\u6f22" in result.stdout


def test_the_command_needs_neither_torch_nor_scipy() -> None:
    modules: Any = [
        "trace_audit.cli.diff",
        "trace_audit.diff.compare",
        "trace_audit.diff.save",
        "trace_audit.diff.exhibit",
        "trace_audit.report.as_json",
        "trace_audit.report.html",
        "trace_audit.report.markdown",
        "trace_audit.report.terminal",
        "trace_audit.report.token_view",
    ]
    code = (
        "import importlib, sys\n"
        f"importlib.import_module({modules[0]!r})\n"
        "assert not {'numpy', 'pyarrow', 'rich'} & sys.modules.keys(), 'heavy imports'\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "bad = {'torch', 'scipy', 'transformers', 'triton', 'pandas'} & sys.modules.keys()\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
