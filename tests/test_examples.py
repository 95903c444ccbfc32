"""The examples run as they are, on a tiny model."""

from __future__ import annotations

from examples import engine_api


def test_the_engine_api_generates_replays_and_compares(checkpoint, capsys):
    engine_api.main([str(checkpoint()), "--max-tokens", "6"])
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["sequence", "tokens"]
    assert [row.split()[0] for row in rows] == ["prompt-0", "prompt-1", "prompt-2"]
    for row in rows:
        _name, tokens, mean, largest, _not_best = row.split()
        assert tokens == "6"
        assert 0 < float(mean) < float(largest) < 1
    assert last == "prompt 0 alone has the logits it had among others: yes"
