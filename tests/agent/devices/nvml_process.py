"""A process of its own that reads devices, since a library is loaded once and for all, and a call of it may hang.

Its argument is the folder of maps. It takes one JSON command a line and answers with one line of JSON:
`{"do": "read"}` reads one round on the spot, `{"do": "advance", "seconds": 60}` moves the reader's clock,
`{"do": "nodes", "names": [...]}` changes the device files, `{"do": "watch", "timeout": 0.2}` starts a monitor,
`{"do": "view", "rounds": 1}` waits for that many rounds and shows its view, `{"do": "now"}` shows it as it is.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from agent.devices.nvml import NvmlReader, meminfo


class Desk:
    """What the commands act on."""

    def __init__(self, maps: Path, proc: Path) -> None:
        self.ahead = 0.0
        self.names: tuple[str, ...] = ("nvidia0",)
        self.maps = maps
        self.reader = NvmlReader(
            monotonic=lambda: time.monotonic() + self.ahead,
            system=lambda: meminfo(proc / "meminfo"),
            nodes=lambda: self.names,
        )
        self.watch: Any = None

    def carry_out(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "read":
                return dataclasses.asdict(self.reader.read(lambda doing: None))
            case "advance":
                self.ahead += command["seconds"]
            case "nodes":
                self.names = tuple(command["names"])
            case "watch":
                # Only here, since it loads far more than the reader does, and most tests need the reader alone.
                from tests.agent.devices.monitor_view import Watch

                self.watch = Watch(self.reader, self.maps, command["timeout"])
            case "view":
                return self.watch.after(command["rounds"])
            case "now":
                return self.watch.now()
        return None


def main() -> None:
    maps, proc = Path(sys.argv[1]), Path(sys.argv[2])
    desk = Desk(maps, proc)
    for line in sys.stdin:
        print(json.dumps(desk.carry_out(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
