"""A file that was asked for while the page refreshed: against Streamlit's own manager of files."""

from __future__ import annotations

import pytest
from streamlit.runtime.media_file_manager import MediaFileManager
from streamlit.runtime.media_file_storage import MediaFileStorageError
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage

from dashboard.pending_downloads import GRACE_SECONDS, keep_pending_downloads


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patched(clock: Clock) -> type[MediaFileManager]:
    class Patched(MediaFileManager):
        pass

    assert keep_pending_downloads(Patched, clock)
    return Patched


def refreshed(kind: type[MediaFileManager]) -> tuple[MediaFileManager, str, str]:
    """A manager after a refresh of a button, and the button's name before and after it."""
    manager = kind(storage=MemoryMediaFileStorage("/media"))
    old = manager.add_deferred(lambda: "old", "text/plain", "button")
    new = manager.add_deferred(lambda: "new", "text/plain", "button")
    manager.remove_orphaned_files()
    return manager, old, new


def test_streamlit_itself_forgets_the_name_at_once() -> None:
    manager, old, _ = refreshed(MediaFileManager)
    with pytest.raises(MediaFileStorageError, match="not found"):
        manager.execute_deferred(old)  # else this module has become needless


def test_the_name_of_before_the_refresh_still_works(patched: type[MediaFileManager]) -> None:
    manager, old, new = refreshed(patched)
    assert manager.execute_deferred(old) != manager.execute_deferred(new)


def test_it_is_forgotten_after_a_while_and_the_new_one_is_not(patched: type[MediaFileManager], clock: Clock) -> None:
    manager, old, new = refreshed(patched)
    for _ in range(2):
        clock.now += GRACE_SECONDS
        manager.remove_orphaned_files()
    with pytest.raises(MediaFileStorageError, match="not found"):
        manager.execute_deferred(old)
    assert manager.execute_deferred(new)
    assert not vars(manager)["_kvatlas_orphaned_since"]


def test_refreshes_without_end_leave_no_names_behind(patched: type[MediaFileManager], clock: Clock) -> None:
    manager, _, _ = refreshed(patched)
    for _ in range(50):
        clock.now += 1.0
        manager.add_deferred(lambda: "again", "text/plain", "button")
        manager.remove_orphaned_files()
    assert len(manager._deferred_callables) <= GRACE_SECONDS + 2
    assert len(vars(manager)["_kvatlas_orphaned_since"]) <= GRACE_SECONDS + 2


def test_a_manager_of_another_shape_is_left_alone() -> None:
    class Other:
        def remove_orphaned_files(self) -> None: ...

    assert not keep_pending_downloads(Other)
    assert not hasattr(Other, "_remove_orphaned_deferred_callables")
