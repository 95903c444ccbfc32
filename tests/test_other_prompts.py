"""Two records of the "same" prompt are told apart by the ids that the model was given."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.commands import SMALL, command, run

OUTPUT = {"output_token_ids": [65, 300, 7]}
CHAT = {"messages": [{"role": "user", "content": "two and two?"}], **OUTPUT}
BARE, WITH_BOS = ({"prompt_token_ids": ids, **OUTPUT} for ids in ([5, 6, 7], [1, 5, 6, 7]))


def recorded(model: Path, directory: Path, line: dict[str, object]) -> Path:
    directory.mkdir()
    path = directory / "prompts.jsonl"
    path.write_text(json.dumps(line) + "\n")
    run(
        "record", model, "--prompts", path, "-o", directory / "audit", "--set", "device=cpu", *SMALL
    )
    return directory / "audit"


def with_another_template(model: Path, to: Path) -> Path:
    """The same weights and words, and a chat template that adds a system prompt."""
    shutil.copytree(model, to)
    path = to / "chat_template.jinja"
    path.write_text("<system>be brief" + path.read_text())
    return to


@pytest.fixture
def twins(request, model, tmp_path) -> tuple[Path, Path]:
    if request.param == "template":
        other = with_another_template(model, tmp_path / "other")
        return recorded(model, tmp_path / "a", CHAT), recorded(other, tmp_path / "b", CHAT)
    return recorded(model, tmp_path / "a", BARE), recorded(model, tmp_path / "b", WITH_BOS)


@pytest.mark.parametrize("twins", ["template", "bos"], indirect=True)
def test_other_rendered_ids_are_another_trace_whose_runs_are_refused(request, twins):
    a, b = twins
    infos = [json.loads((audit / "audit.json").read_text()) for audit in twins]
    same_file = infos[0]["prompts_sha256"] == infos[1]["prompts_sha256"]
    assert same_file is ("template" in request.node.callspec.id)
    assert infos[0]["trace_sha256"] != infos[1]["trace_sha256"]
    traces = [pq.read_table(audit / "trace.parquet") for audit in twins]
    assert traces[0]["output_token_ids"].equals(traces[1]["output_token_ids"])
    assert not traces[0]["prompt_token_ids"].equals(traces[1]["prompt_token_ids"])
    shutil.copytree(b / "runs" / "record", a / "runs" / "foreign")
    done = subprocess.run(
        command("diff", "report", a, "--candidate", "foreign"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (2, 4)
    assert done.stdout == ""
    assert "foreign" in done.stderr
