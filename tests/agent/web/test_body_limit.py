"""No request makes the agent keep more of it than a body may have, whoever sends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from agent.web.body_limit import BodyLimit
from agent.web.errors import add_error_handlers


class Anything(BaseModel):
    text: str


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.add_middleware(BodyLimit, most=1000)
    add_error_handlers(app)

    @app.post("/length")
    async def length(given: Anything) -> dict[str, int]:
        return {"length": len(given.text)}

    with TestClient(app) as made:
        yield made


def test_a_body_within_the_limit_is_read(client: TestClient) -> None:
    assert client.post("/length", json={"text": "a" * 900}).json() == {"length": 900}


@pytest.mark.parametrize("claimed", ["1001", "9" * 30])
def test_a_body_that_claims_too_much_is_not_read(client: TestClient, claimed: str) -> None:
    reply = client.post("/length", content=b"{}", headers={"content-length": claimed})
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")


def test_a_body_without_a_length_is_cut_off(client: TestClient) -> None:
    pieces = (b" " * 100 for _ in range(100))
    reply = client.post("/length", content=pieces, headers={"content-type": "application/json"})
    assert reply.status_code == 413
    assert "larger than" in reply.json()["message"]
    assert "config.json" in reply.json()["action"]


def test_a_refusal_does_not_send_the_body_back(client: TestClient) -> None:
    secret = "a" * 500
    for content, kind in ((f'{{"text": ["{secret}"]}}', "application/json"), (f'{{"text": "{secret}"}}', "text/plain")):
        reply = client.post("/length", content=content, headers={"content-type": kind})
        assert reply.status_code == 400
        assert len(reply.text) < 400
    assert "send it with the header Content-Type: application/json" in reply.json()["message"]
