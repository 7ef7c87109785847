"""The lasting history as a whole: what fills it, what writes it, and what reads it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from agent.compaction.audit import AuditEntry
from agent.history.lasting import LastingHistory
from agent.history.memory import MemoryHistory
from agent.history.reading import HistoryReader
from agent.history.recorder import LineHandler, Recorder
from agent.history.writer import HistoryWriter
from agent.log import ROOT
from agent.sampling.model import Clock

STOP_SECONDS = 3.0


class HistoryKeeper:
    """Everything that is there where the agent has a state folder. `start` begins to write; `stop` ends all."""

    def __init__(self, folder: Path, max_bytes: int, memory: MemoryHistory, clock: Clock) -> None:
        self.writer = HistoryWriter(folder, max_bytes, clock=clock)
        self.reader = HistoryReader(self.writer.path)
        self.history = LastingHistory(memory, self.writer, self.reader, clock)
        self.recorder = Recorder(self.writer.put)
        self._lines = LineHandler(self.writer.put)
        self._thread = threading.Thread(target=self.writer.run, name="history", daemon=True)

    def attach(self) -> None:
        """Keep the lines of the agent's log from now on."""
        logging.getLogger(ROOT).addHandler(self._lines)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What waits is written first, if the disk lets it."""
        logging.getLogger(ROOT).removeHandler(self._lines)
        self.writer.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def note_decision(self, entry: AuditEntry) -> None:
        """Something was decided, asked for or done; returns at once."""
        self.recorder.note_decision(entry)
