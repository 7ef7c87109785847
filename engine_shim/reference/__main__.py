"""`python -m engine_shim.reference`: serve a trace until a signal says stop; one JSON report at the end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine_shim.compaction.run import RunSettings
from engine_shim.compaction.time_share import MAX_TIME_SHARE
from engine_shim.errors import KvatlasError, SettingsError, TraceError
from engine_shim.pool.policies import POLICIES
from engine_shim.reference.build import EngineSettings, arrivals, build_engine
from engine_shim.reference.clock import RealClock, VirtualClock
from engine_shim.reference.engine import Pace
from engine_shim.reference.geometry import GEOMETRIES, TEST_GEOMETRY, smallest_filling
from engine_shim.reference.quantization import STORED_FORMATS
from engine_shim.reference.scheduler import Limits
from engine_shim.reference.transfer import PINNED_SHARE
from engine_shim.tether import end_with_parent
from engine_shim.workload import load_workload

SCHEMA = "kvatlas.engine-report/v1"
MAX_THREADS = 1024
log = logging.getLogger("kvatlas.engine")


def build_parser() -> argparse.ArgumentParser:
    """The engine's flags; defaults are those of the settings classes."""
    parser = argparse.ArgumentParser(prog="python -m engine_shim.reference", description=__doc__)
    parser.add_argument("--engine-id", default="reference", help="stable name of the engine, part of the map's name")
    parser.add_argument("--trace", default="mooncake-conversation", help="bundled trace or file")
    parser.add_argument("--policy", default="vllm", choices=tuple(POLICIES), help="where the next block comes from")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of the pool, block 0 included")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--headroom", type=float, default=0.10, help="share that new sequences may not take")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--model-geometry",
        default="stories260K",
        choices=("auto", *GEOMETRIES),
        help="shape of the KV cache; auto: the smallest with which the pool takes at least --least-kv-mib",
    )
    parser.add_argument("--least-kv-mib", type=int, default=512, help="for --model-geometry auto")
    parser.add_argument(
        "--kv-dtype",
        "--dtype",
        dest="dtype",
        default="float16",
        choices=STORED_FORMATS,
        help="of keys and values: plain, fp8 (e4m3, saturating), or with scales for each head and token or 32 elements",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--content", default="pattern", choices=("pattern", "model"), help="what the blocks hold")
    parser.add_argument("--speed", type=float, default=1.0, help="trace seconds a second")
    parser.add_argument("--tokens-per-second", type=float, default=30.0, help="decoding of a sequence; 0 is unbounded")
    parser.add_argument("--max-sequences", type=int, default=256, help="running at once")
    parser.add_argument("--step-tokens", type=int, default=8192, help="computed in one step at most")
    parser.add_argument("--samples", type=int, default=1, help="continuations of each prompt, which share its blocks")
    parser.add_argument("--seed", type=int, default=1, help="of patterns and weights")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--requests", type=int, default=0, help="serve only the first so many; 0 for all")
    parser.add_argument("--loop", action="store_true", help="start the trace again after its end, with other contents")
    parser.add_argument("--virtual-time", action="store_true", help="do not wait for arrivals: as fast as it computes")
    parser.add_argument("--exit-when-done", action="store_true", help="end when all requests are served")
    parser.add_argument("--verify-every", type=int, default=0, help="steps between checks of contents (pattern mode)")
    parser.add_argument("--relocation-mib", type=int, default=64, help="copied in one step at most by the policy")
    parser.add_argument("--moving", action=argparse.BooleanOptionalAction, default=True, help="may live blocks move?")
    parser.add_argument("--move-budget-ms", type=float, default=2.0, help="that one step may be held up by moving")
    parser.add_argument("--move-time-share", type=float, default=MAX_TIME_SHARE, help="of the time that there is work")
    parser.add_argument("--verify-moves", action="store_true", help="compare contents before each move is committed")
    parser.add_argument("--elastic", action="store_true", help="give memory that a compaction has emptied to the host")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True, help="socket beside the map")
    parser.add_argument("--transfer-dir", type=Path, help="send finished sequences to files in this folder")
    parser.add_argument("--transfer-peer", help="send finished sequences to host:port or unix:/path")
    parser.add_argument("--transfer-every", type=int, default=1, help="send each n-th finished sequence")
    parser.add_argument("--transfer-rate", type=float, help="bytes a second of trace time; unbounded by default")
    parser.add_argument("--transfer-pinned-share", type=float, default=PINNED_SHARE, help="of the pool, in transfer")
    parser.add_argument("--map-folder", type=Path, help="folder of the allocation map; KVATLAS_DIR by default")
    parser.add_argument("--end-with-parent", action="store_true", help="stop when the process that started us ends")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 0 after an orderly end, 1 where contents differed or something failed, 2 on wrong usage."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    if options.end_with_parent:
        end_with_parent()
    stop = _StopOnSignal()
    try:
        return _serve(options, stop)
    except KvatlasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (SettingsError, TraceError)) else 1


class _StopOnSignal:
    """Notes SIGTERM and SIGINT. The handler sets one attribute: it may interrupt any line of the engine's thread."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: object) -> None:
        self.requested = True


def _serve(options: argparse.Namespace, stop: _StopOnSignal) -> int:
    geometry = options.model_geometry
    if geometry == "auto":
        stored = STORED_FORMATS[options.dtype]
        geometry = smallest_filling(
            options.blocks,
            block_tokens=options.block_size,
            token_bytes=stored.token_bytes,
            least_bytes=options.least_kv_mib << 20,
            among=[g for g in GEOMETRIES.values() if g is not TEST_GEOMETRY and not stored.refusal(g.head_dim)],
        ).name
    settings = EngineSettings(
        engine_id=options.engine_id,
        policy=options.policy,
        blocks=options.blocks,
        block_tokens=options.block_size,
        headroom=options.headroom,
        prefix_cache=options.prefix_cache,
        model_geometry=geometry,
        dtype=options.dtype,
        device=options.device,
        content=options.content,
        limits=Limits(options.max_sequences, options.step_tokens),
        pace=Pace(options.speed, options.tokens_per_second),
        samples=options.samples,
        seed=options.seed,
        verify_every=options.verify_every,
        relocation_bytes=options.relocation_mib << 20,
        compaction=RunSettings(max_step_seconds=options.move_budget_ms / 1000, verify=options.verify_moves),
        moving_time_share=options.move_time_share,
        moving=options.moving,
        elastic=options.elastic,
        control=options.control,
        transfer_folder=options.transfer_dir,
        transfer_peer=options.transfer_peer,
        transfer_every=options.transfer_every,
        transfer_bytes_per_second=options.transfer_rate,
        transfer_pinned_share=options.transfer_pinned_share,
    )
    if not 1 <= options.threads <= MAX_THREADS:
        raise SettingsError(f"threads={options.threads} must be 1 to {MAX_THREADS}")
    torch.set_num_threads(options.threads)
    workload = load_workload(options.trace)
    if options.requests:
        workload = dataclasses.replace(workload, requests=workload.requests[: options.requests])
    clock = VirtualClock() if options.virtual_time else RealClock()
    engine, observer = build_engine(settings, clock, map_folder=options.map_folder)
    log.info(
        "engine %s: %d blocks of %s, %d MiB on %s, policy %s, pid %d",
        settings.engine_id, settings.blocks, settings.model_geometry, engine.cache.nbytes >> 20,
        engine.cache.device, settings.policy, os.getpid(),
    )  # fmt: skip
    begun = time.monotonic()
    try:
        engine.serve(
            arrivals(workload, settings, loop=options.loop),
            settings.pace,
            stop=lambda: stop.requested,
            until_idle=options.exit_when_done,
        )
        if options.verify_every and not stop.requested:  # all of it takes a while; a signal wants an end soon
            for line in engine.verify_all():
                log.error("%s", line)
        report = engine.report()
        wall_seconds = time.monotonic() - begun  # those of the report are the clock's
    finally:
        engine.close()
        close = getattr(observer, "close", None)
        if close is not None:
            close()
    facts = {"engine_id": settings.engine_id, "skipped_requests": workload.skipped, "kv_bytes": engine.cache.nbytes}
    print(
        json.dumps({"schema": SCHEMA, **facts, "wall_seconds": wall_seconds, **dataclasses.asdict(report)}), flush=True
    )
    return 1 if report.mismatched_blocks else 0


if __name__ == "__main__":
    sys.exit(main())
