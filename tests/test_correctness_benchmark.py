"""`benchmarks/correctness.py` on a tiny model: every row right, and a fault in one seen."""

from __future__ import annotations

import json

import pytest

from benchmarks import correctness
from trace_audit.engine.model_runner import ModelRunner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_run_keeps_what_it_must(checkpoint, tmp_path, capsys, dtype):
    path = tmp_path / "rows.json"
    arguments = ["--model", str(checkpoint("llama-2l")), "--dtype", dtype, "--json", str(path)]
    assert correctness.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()[2:]
    rows = json.loads(path.read_text())
    assert [line.split("|")[1].strip() for line in table] == [row["name"] for row in rows]
    assert len(rows) == len(correctness.ROWS) == 8
    for row in rows:
        assert row["ok"]
        assert row["tokens"] == row["matched"]
        assert row["finished"] == row["requests"] == correctness.NUM_REQUESTS
    owing = [row["name"] for row in rows if not row["owes_bits"]]
    assert owing == ["TP 2, emulated", "preemption, recompute"]
    assert all(row["preemptions"] > 10 for row in rows if row["needs_preemption"])


def test_swapped_blocks_that_come_back_changed_fail_their_rows(checkpoint, capsys, monkeypatch):
    admit = ModelRunner.admit

    def damaged(self, request):
        for saved in self._swapped.get(request.request_id, [[]])[0][:1]:
            saved += 1
        admit(self, request)

    monkeypatch.setattr(ModelRunner, "admit", damaged)
    monkeypatch.setattr(correctness, "ROWS", (correctness.one_rank, correctness.swapped))
    assert correctness.main(["--model", str(checkpoint("llama-2l"))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("| all | ok |")
    assert lines[3].endswith("| FAIL |")
    assert "logits_hash" in lines[3]
