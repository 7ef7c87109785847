"""Lets a file be had that was asked for in the very moment of a refresh.

Each run of a part of the page gives its download buttons new names for what they would make, and Streamlit forgets the
old ones at the end of that run: before the browser has heard of the new ones. A click in between would come to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from streamlit.runtime.media_file_manager import MediaFileManager

GRACE_SECONDS = 10.0
_NEEDED = ("_remove_orphaned_deferred_callables", "_drop_deferred_id")


def keep_pending_downloads(manager: type[Any] = MediaFileManager, clock: Callable[[], float] = time.monotonic) -> bool:
    """Make `manager` forget what no button names any more GRACE_SECONDS later; False where it is not as expected, which
    leaves it as it is."""
    if not all(callable(getattr(manager, name, None)) for name in _NEEDED):
        return False

    def remove(self: Any) -> None:
        now = clock()
        named = {one for names in self._files_by_session_and_coord.values() for one in names.values()}
        since: dict[str, float] = self.__dict__.setdefault("_kvatlas_orphaned_since", {})
        for file_id in list(self._deferred_callables):
            if file_id in named:
                since.pop(file_id, None)
            elif now - since.setdefault(file_id, now) >= GRACE_SECONDS:
                self._drop_deferred_id(file_id)
        for file_id in since.keys() - self._deferred_callables.keys():
            del since[file_id]

    manager._remove_orphaned_deferred_callables = remove
    return True
