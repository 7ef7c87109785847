"""Addresses that are secrets: whoever knows a Slack webhook's URL can write to its channel."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from alerts.errors import AlertsConfigError

MOST_BYTES = 8192


class SecretUrl:
    """A URL that shows its host alone, however it is printed. `reveal` is for the one who sends."""

    __slots__ = ("_host", "_url")

    def __init__(self, url: str, *, what: str, plain_http: bool = False) -> None:
        """`what` names the setting in errors. Raises AlertsConfigError: plain HTTP goes to loopback alone, unless
        `plain_http`."""
        url = url.strip()
        if not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
            raise AlertsConfigError(f"{what} holds spaces or other characters that no URL has; copy it anew")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise AlertsConfigError(f"{what} is not a URL; give https://HOST/PATH") from None
        if parts.scheme not in ("http", "https") or not host:
            raise AlertsConfigError(f"{what} is not a URL; give https://HOST/PATH")
        if parts.scheme == "http" and not plain_http and not is_loopback(host):
            raise AlertsConfigError(
                f"{what} is plain HTTP to another host, which anyone on the way reads; give https://"
            )
        self._url = url
        self._host = host

    @classmethod
    def read(cls, *, what: str, file: Path | None = None, variable: str = "", plain_http: bool = False) -> Self:
        """From a file, else from a variable of the environment. Raises AlertsConfigError."""
        if file is not None:
            try:
                with file.open("rb") as opened:  # never all of it: it may be no file of ours, and have no end
                    text = opened.read(MOST_BYTES).decode("ascii")
            except OSError as error:
                raise AlertsConfigError(f"{what}: {file} cannot be read ({error.strerror}); mend the path") from None
            except UnicodeDecodeError:
                raise AlertsConfigError(f"{what}: {file} does not hold a URL") from None
            return cls(text, what=f"{what} (in {file})", plain_http=plain_http)
        text = os.environ.get(variable, "")
        if not text:
            raise AlertsConfigError(f"{what}: {variable} is not set; name a file or set it")
        return cls(text, what=f"{what} (in {variable})", plain_http=plain_http)

    @property
    def host(self) -> str:
        return self._host

    @property
    def scheme(self) -> str:
        return urlsplit(self._url).scheme

    def reveal(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"<URL at {self._host}>"

    __str__ = __repr__

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret URL is not written down")


def is_loopback(host: str) -> bool:
    """By its name or number, without asking for either."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
