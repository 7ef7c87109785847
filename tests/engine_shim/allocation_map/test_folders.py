"""Where maps are written and looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_shim.allocation_map import folders


def test_a_configured_folder_is_the_only_one(tmp_path: Path) -> None:
    environment = {"KVATLAS_DIR": f"{tmp_path}:/other"}
    assert folders.map_folders(environment) == (tmp_path, Path("/other"))
    assert folders.writer_folder(environment).path == tmp_path


def test_the_shared_folder_counts_only_where_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path("/dev/shm")
    monkeypatch.setattr(folders, "SHARED_FOLDER", tmp_path)
    if folders.file_system(tmp_path) != "tmpfs":
        assert folders.writer_folder({}).path.parent == memory
    monkeypatch.setattr(folders, "SHARED_FOLDER", memory)
    chosen = folders.writer_folder({})
    assert (chosen.path, chosen.warning) == (memory, "")


def test_without_memory_the_temporary_folder_comes_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHARED_FOLDER", tmp_path / "none")
    monkeypatch.setattr(folders, "MEMORY_FOLDER", tmp_path / "none")
    monkeypatch.setattr(folders, "is_in_memory", lambda path: False)
    chosen = folders.writer_folder({"TMPDIR": str(tmp_path)})
    assert chosen.path.parent == tmp_path
    assert "KVATLAS_DIR" in chosen.warning


def test_every_users_folder_is_looked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MEMORY_FOLDER", tmp_path)
    (tmp_path / "kvatlas-10001").mkdir()
    (tmp_path / "kvatlas-0").mkdir()
    (tmp_path / "kvatlas-7").write_text("")
    (tmp_path / "kvatlas-demo-x1").mkdir()  # scratch of a demo, which holds no maps
    found = folders.map_folders({"TMPDIR": str(tmp_path / "none")})
    assert found == (folders.SHARED_FOLDER, tmp_path / "kvatlas-0", tmp_path / "kvatlas-10001")


def test_the_file_system_of_a_folder_that_is_not_there_is_its_parents() -> None:
    assert folders.file_system(Path("/dev/shm/none/at/all")) == folders.file_system(Path("/dev/shm")) != ""
