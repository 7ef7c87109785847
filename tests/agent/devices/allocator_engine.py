"""An engine process with a map, a control socket that its engine never looks into, and a torch that has CUDA at work.

Its argument is the folder. It prints the map's path when it serves, and ends when its input does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine_shim import MapObserver, MapSpec
from engine_shim.control.mailbox import ControlMailbox
from engine_shim.control.server import ControlServer
from tests.engine_shim.control.stand_in_torch import SEGMENTS, Cuda, torch_with

UUID = "GPU-00000000-aaaa-bbbb-cccc-000000000000"


def main() -> None:
    sys.modules["torch"] = torch_with(Cuda(SEGMENTS))
    observer = MapObserver.create(
        MapSpec(
            engine_id="engine",
            kind="vllm",
            model="org/model",
            pool="kv",
            total_blocks=1024,
            block_tokens=16,
            block_bytes=2**20,
            dtype="bfloat16",
            medium="cuda",
            gpu_uuids=(UUID,),
        ),
        Path(sys.argv[1]),
    )
    assert observer.path is not None
    server = ControlServer.start(Path(observer.path), ControlMailbox())
    print(observer.path, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
