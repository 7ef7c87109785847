"""Text in fixed room, and names that are safe as files."""

from __future__ import annotations

import hashlib
import re


def fit(text: str, size_bytes: int) -> bytes:
    """UTF-8 of at most `size_bytes`; what is too long keeps its beginning and gets a digest, to stay distinct."""
    encoded = text.encode("utf-8", "replace").replace(b"\x00", b"?")
    if len(encoded) <= size_bytes:
        return encoded
    mark = b"~" + hashlib.sha256(encoded).hexdigest()[: min(12, size_bytes - 1)].encode()
    kept = encoded[: size_bytes - len(mark)].decode("utf-8", "ignore").encode()
    return kept + mark


def safe_name(text: str) -> str:
    """A part of a file name: letters, digits, `_`, `-`; what had to be changed gets a digest, to stay distinct."""
    cleaned = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:80]
    if cleaned == text:
        return text
    return f"{cleaned}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}".lstrip("-")
