"""Takes out of what is kept, or sent to others, what is nobody else's business: request ids, salts, secrets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from pydantic import SecretStr

from agent.config import AgentSettings
from engine_shim.errors import MapCorrupt
from engine_shim.layout import HEADER, MAGIC, NO_OWNER, OWNER, REGION

SHOWN = 32  # hexadecimal digits of a hash: as many as the narrowest column of a map holds
HIDDEN = "(hidden)"
SHORTEST_SECRET = 4  # shorter ones would be found all over
_USER = re.compile(r"//[^/@\s]*@")


def hash_id(text: str) -> str:
    """The start of the SHA-256 of a request id; "" where there is none."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:SHOWN] if text else ""


def scrub_map(content: bytearray) -> None:
    """Hash, in place, the request ids and cache salts in a map's table of owners; rows that ended are emptied.

    Raises MapCorrupt where the table is not found, so that nobody keeps what was not scrubbed.
    """
    if len(content) < HEADER.itemsize or not content.startswith(MAGIC):
        raise MapCorrupt("not an allocation map (wrong magic)")
    header = np.frombuffer(content, HEADER, 1)[0]
    offset, size = int(header["region_offset"]), int(header["region_entry_bytes"])
    scrubbed = False
    for index in range(min(int(header["region_count"]), 64)):
        start = offset + index * size
        if size < REGION.itemsize or start + REGION.itemsize > len(content):
            raise MapCorrupt("its region table lies outside the file")
        region = np.frombuffer(content, REGION, 1, start)[0]
        if region["name"] == b"owners":
            _scrub_owners(content, int(region["offset"]), int(region["count"]), int(region["item_bytes"]))
            scrubbed = True
    if not scrubbed:
        raise MapCorrupt("it has no table of owners")


def _scrub_owners(content: bytearray, offset: int, count: int, item_bytes: int) -> None:
    if item_bytes != OWNER.itemsize or offset + count * item_bytes > len(content):
        raise MapCorrupt("its table of owners lies outside the file, or has rows of another version")
    rows = np.frombuffer(content, OWNER, count, offset)  # a view: the bytes are those of `content`
    rows[rows["owner"] == NO_OWNER] = np.zeros((), OWNER)
    for column in ("request_id", "cache_salt"):
        for index in np.flatnonzero(rows[column] != b"").tolist():
            rows[column][index] = hash_id(rows[column][index].decode("utf-8", "replace")).encode()


def tell_settings(settings: AgentSettings) -> dict[str, Any]:
    """Every setting by name; of a secret only whether it is set, and addresses without who logs in there."""
    told: dict[str, Any] = {}
    for name, field in AgentSettings.model_fields.items():
        value = getattr(settings, name)
        if SecretStr in (field.annotation, *get_args(field.annotation)):
            told[name] = None if value is None else HIDDEN
        elif isinstance(value, tuple | list):
            told[name] = [_without_user(str(one)) for one in value]
        elif value is None or isinstance(value, bool | int | float):
            told[name] = value
        else:
            told[name] = _without_user(str(value))
    return told


def known_secrets(settings: AgentSettings) -> tuple[str, ...]:
    """The values of all secrets, the longest first; those in files too, as far as they can be read."""
    found: set[str] = set()
    for name in AgentSettings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            found.add(value.get_secret_value())
        elif f"{name}_file" in AgentSettings.model_fields and (path := getattr(settings, f"{name}_file")) is not None:
            try:
                text = path.read_text().strip()
            except (OSError, UnicodeDecodeError):
                continue  # what this user may not read cannot get in either
            found |= {text, *_passwords(text)}
        elif isinstance(value, str | tuple | list):
            texts = [value] if isinstance(value, str) else [str(one) for one in value]
            for text in texts:
                found |= _passwords(text)
    return tuple(sorted((one for one in found if len(one) >= SHORTEST_SECRET), key=len, reverse=True))


def hide(text: str, secrets: tuple[str, ...]) -> str:
    """The text with each of these, wherever it stands, replaced."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def tell_audit(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An audit entry with its asker's address hashed."""
    asker = dict(entry.get("asker") or {})
    if asker.get("address"):
        asker["address"] = hash_id(str(asker["address"]))
    return {**entry, "asker": asker}


def _passwords(text: str) -> set[str]:
    """Of USER:PASSWORD in addresses the password; who logs in with one word keeps that one secret."""
    return {user[2:-1].rpartition(":")[2] for user in _USER.findall(text)}


def _without_user(text: str) -> str:
    return _USER.sub(f"//{HIDDEN}@", text)
