"""Error families, named by what the caller should do about them."""

from __future__ import annotations


class KvatlasError(Exception):
    """Root of every error that KVAtlas raises on purpose."""


class SettingsError(KvatlasError):
    """The operator must change something; the text says what."""


class MapUnavailable(KvatlasError):
    """Transient: the map is not there yet, is being replaced, or its writer is too restless. Poll again."""


class MapCorrupt(KvatlasError):
    """Wrong magic, bounds or contents. Reading again cannot help; the file is left untouched."""


class MapVersionError(MapCorrupt):
    """The map needs a newer reader; the text names the version needed."""


class MapSpaceError(KvatlasError):
    """The map cannot be created where it should be: no space, or not writable. The engine goes on without it."""


class MapBusy(KvatlasError):
    """Another live writer holds this map. Give this engine another id or pool name."""


class TraceError(KvatlasError):
    """A trace or recording cannot be read; the text names the file and the line."""


class PoolError(KvatlasError):
    """An impossible request to a block pool. The pool is unchanged."""


class PoolExhausted(PoolError):
    """Fewer blocks can be allocated than were asked for. Preempt, evict or wait, then ask again."""


class DoubleFree(PoolError):
    """A block was released more often than it was referenced: a bug in the caller."""


class UnknownBlock(PoolError):
    """A block id that the pool does not have, or that may never be allocated: a bug in the caller."""


class ControlUnavailable(KvatlasError):
    """The engine cannot be asked now: it offers no control, has ended, or does not answer. The text says which."""


class ControlTimeout(ControlUnavailable):
    """No reply in time, so nobody knows whether the request was carried out. Ask for the status before asking again."""


class ControlRefused(KvatlasError):
    """The engine said no. Change who asks, or what is asked for; where it is busy, wait for the run to end.

    `error` is the reason in one stable word, `field` the part of the request that was wrong ("" where none was).
    """

    def __init__(self, message: str, *, error: str = "refused", field: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.field = field


class ControlMalformed(KvatlasError):
    """A control message is none of this version's; `field` names the part. Run one version of KVAtlas on both sides."""

    def __init__(self, message: str, *, error: str = "bad_request", field: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.field = field
