"""Messages about errors in a round: what was being done, and where in the user's code."""

from __future__ import annotations

import re

import pytest
import torch
from torchmetrics.functional import accuracy

from cfl.federation.channel import Channel
from cfl.runtime.error_context import ErrorContext

CONTEXT = ErrorContext(lambda: "closing the round failed in round 3")


def _users() -> None:
    raise KeyError("conv.weight")


def test_it_says_where_the_users_code_failed() -> None:
    line = _users.__code__.co_firstlineno + 1
    said = (
        f"closing the round failed in round 3: KeyError: 'conv.weight' (test_error_context.py, line {line}, in _users)"
    )
    with pytest.raises(RuntimeError, match=re.escape(said)) as found, CONTEXT:
        _users()
    assert isinstance(found.value.__cause__, KeyError)


def test_of_calls_into_the_program_it_names_the_last_line_of_the_users() -> None:
    """A frame of ours below the user's says what, the user's says where."""
    with (
        pytest.raises(RuntimeError, match=r"a row for each client \(test_error_context\.py, line \d+, in test_of"),
        CONTEXT,
    ):
        Channel().uplink("mine", {"count": torch.tensor(3.0)}, [1.0], [0])


def test_of_calls_into_torchmetrics_it_names_the_last_line_of_the_users() -> None:
    with (
        pytest.raises(RuntimeError, match=r"\(test_error_context\.py, line \d+, in test_of_calls_into_torchmetrics"),
        CONTEXT,
    ):
        accuracy(torch.zeros(2), torch.zeros(3, dtype=torch.int64), task="binary")


def test_without_code_of_the_user_it_names_no_place() -> None:
    error = ValueError("no code")
    with pytest.raises(RuntimeError, match=r"in round 3: ValueError: no code$"):
        CONTEXT.__exit__(ValueError, error, None)
