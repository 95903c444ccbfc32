"""What a run says of the machines it ran on."""

from __future__ import annotations

from trace_audit.run_info import _fingerprint


def test_ranks_of_one_environment_have_its_fingerprint() -> None:
    assert _fingerprint([{"environment_fingerprint": "a"}] * 3) == "a"


def test_ranks_of_several_environments_are_an_environment_of_their_own() -> None:
    mixed = [{"environment_fingerprint": name} for name in "ab"]
    swapped = list(reversed(mixed))
    found = {_fingerprint(mixed), _fingerprint(swapped), "a", "b"}
    assert len(found) == 4
