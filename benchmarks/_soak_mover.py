"""One engine of the soak whose blocks are moved, each of them followed by what it must hold. It ends in good order.

python benchmarks/_soak_mover.py JSON (the options of tests/agent/pool_engine.py)
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine_shim.control.server import ControlServer  # noqa: E402 - needs the path above
from tests.agent.pool_engine import Engine  # noqa: E402


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine = Engine(json.loads(sys.argv[1]))
    if engine.observer.path is None:
        sys.exit(f"no map: {engine.observer.reason}")
    server = ControlServer.start(engine.observer.path, engine.mailbox)
    print("ready", flush=True)
    try:
        engine.serve()
    finally:
        engine.observer.close()
        server.close()


if __name__ == "__main__":
    main()
