"""A real engine process for the tests: performs observer calls that it reads from its standard input, one a line.

`{"call": "allocated", "args": [[1, 2]]}` calls that method of the MapObserver and prints its result as JSON. The
first line holds the keyword arguments of MapSpec under "spec" and the folder of the map under "folder".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine_shim import MapObserver, MapSpec


def main() -> None:
    first = json.loads(sys.stdin.readline())
    observer = MapObserver.create(MapSpec(**first["spec"]), Path(first["folder"]))
    print(json.dumps(str(observer.path)), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["call"] == "exit":
            return
        method = getattr(observer, command["call"])
        result = method(*command.get("args", []), **command.get("kwargs", {}))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
