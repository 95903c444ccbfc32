"""What a run says of the machines it ran on."""

from __future__ import annotations

import pytest

from trace_audit.errors import ModelError
from trace_audit.run_info import _fingerprint
from trace_audit.run_setup import find_model


def test_ranks_of_one_environment_have_its_fingerprint() -> None:
    assert _fingerprint([{"environment_fingerprint": "a"}] * 3) == "a"


def test_ranks_of_several_environments_are_an_environment_of_their_own() -> None:
    mixed = [{"environment_fingerprint": name} for name in "ab"]
    swapped = list(reversed(mixed))
    found = {_fingerprint(mixed), _fingerprint(swapped), "a", "b"}
    assert len(found) == 4


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(ModelError, match="the model is empty"):
        find_model("")
