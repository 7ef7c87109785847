"""Who may change things."""

from __future__ import annotations

import pytest

from agent.web.security import WriteGuard, is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("token", "loopback", "header", "peer", "allowed"),
    [
        (None, True, None, "127.0.0.1", True),
        (None, True, None, "10.0.0.1", False),
        (None, True, None, None, False),
        (None, False, None, "127.0.0.1", False),
        ("secret", True, None, "127.0.0.1", False),
        ("secret", False, "Bearer secret", "10.0.0.1", True),
        ("secret", False, "bearer secret", "10.0.0.1", True),
        ("secret", False, "Bearer secre", "10.0.0.1", False),
        ("secret", False, "Basic secret", "10.0.0.1", False),
        ("secret", False, "Bearer", "10.0.0.1", False),
        ("geheimnis-ü", False, "Bearer geheimnis-ü", "10.0.0.1", True),
    ],
)
def test_write_guard(token: str | None, loopback: bool, header: str | None, peer: str | None, allowed: bool) -> None:
    access = WriteGuard(token=token, listens_on_loopback=loopback).check(header, peer)
    assert access.allowed is allowed
    assert bool(access.message and access.action) is not allowed


def test_a_web_page_may_not_change_things_without_a_token() -> None:
    """The browser of whoever sits at this machine is loopback, whatever page it shows."""
    page = "https://pages.example.org"
    assert not WriteGuard(token=None, listens_on_loopback=True).check(None, "127.0.0.1", page).allowed
    assert WriteGuard(token="secret", listens_on_loopback=True).check("Bearer secret", "127.0.0.1", page).allowed


def test_without_token_beyond_loopback_changes_are_off() -> None:
    assert not WriteGuard(token=None, listens_on_loopback=False).enabled
    assert WriteGuard(token=None, listens_on_loopback=True).enabled
    assert WriteGuard(token="secret", listens_on_loopback=False).enabled
