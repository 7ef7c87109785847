"""Faults as clients see them."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from agent.web.errors import add_error_handlers


@pytest.mark.parametrize(
    ("fault", "status", "word"),
    [
        pytest.param(RuntimeError("can't start new thread"), 503, "unavailable", id="no thread for now"),
        pytest.param(RuntimeError("another one"), 500, "internal", id="a fault of ours"),
    ],
)
def test_a_fault_has_the_one_shape(fault: Exception, status: int, word: str) -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/fails")
    async def fails() -> None:
        raise fault

    answer = TestClient(app).get("/fails")
    assert (answer.status_code, answer.json()["error"]) == (status, word)
