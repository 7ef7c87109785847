"""Runs vLLM as it runs in production, engine core and worker in processes of their own, and stops the worker.

    python drive_serving.py WORK_FOLDER

Prints one line, `RESULT {...}`. With KVATLAS_DISABLE=1 it only serves and looks for traces.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny_model  # type: ignore[import-not-found]  # beside this file
from vllm import LLM, SamplingParams

from engine_shim import MapReader
from engine_shim.control.messages import (
    CompactRequest,
    PlanRequest,
    RelocationRequest,
    StatusRequest,
    TurnOffRequest,
    encode_request,
)
from engine_shim.control.peer import SOCKET_SUFFIX, socket_address, socket_path

WORK = Path(sys.argv[1])
MAPS = Path(os.environ["KVATLAS_DIR"])
SECONDS = 300.0
MOVES_WANTED = 20


def wait_for(condition: Callable[[], Any]) -> Any:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} was not true within {SECONDS} s")
        time.sleep(0.02)
    return found


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> str:
    """Its title, where vLLM has set one."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\x00", b" ").decode(errors="replace")
    except OSError:
        return ""


def serve(llm: Any) -> list[list[int]]:
    """Greedy tokens of the same requests as the in-process driver serves."""
    dice = random.Random(5)
    prompts = [{"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(40 + 30 * number)]} for number in range(6)]
    parameters = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, parameters, use_tqdm=False)]


def main() -> None:
    disabled = os.environ.get("KVATLAS_DISABLE") == "1"
    llm = LLM(
        model=str(tiny_model.write(WORK / "serving")),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=72,
        max_num_seqs=12,
        max_num_batched_tokens=192,
        max_model_len=1024,
        seed=0,
        **({} if disabled else {"distributed_executor_backend": "mp"}),
    )
    report: dict[str, Any] = {"tokens": serve(llm), "maps": sorted(path.name for path in MAPS.glob("*.kvmap"))}
    if disabled:
        from vllm.config.scheduler import SchedulerConfig
        from vllm.v1.core.sched.scheduler import Scheduler

        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        report["hooked"] = [
            name
            for holder in (SchedulerConfig, Scheduler, scheduler, pool)
            for name, value in vars(holder).items()
            if hasattr(value, "__kvatlas__") or hasattr(value, "__kvatlas_hook__")
        ]
        report["threads"] = [thread.name for thread in threading.enumerate() if "kvatlas" in thread.name]
        report["folder_made"] = MAPS.exists()
    else:
        report |= stop_the_worker(llm)
        report |= move_meanwhile(llm)
        report |= ask_the_idle(llm)
    print("RESULT " + json.dumps(report), flush=True)


def stop_the_worker(llm: Any) -> dict[str, Any]:
    """A worker that hangs holds the engine core up in the middle of a step: the map must show just that."""
    (path,) = MAPS.glob("*.kvmap")
    reader = MapReader(path)
    identity = reader.identity
    before = wait_for(lambda: (snapshot := reader.read()).running_requests == 0 and snapshot)
    # vLLM has begun the step after the last one already, and would wait for that before it hears of requests. Only an
    # engine core that is idle, or begins a step, answers.
    ask(path, StatusRequest())
    workers = children_of(identity.pid)
    worker = next(pid for pid in workers if "VLLM::Worker" in command_of(pid) or len(workers) == 1)
    served: list[Any] = []
    os.kill(worker, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=lambda: served.extend(serve(llm)), daemon=True)
        thread.start()
        try:
            stuck = wait_for(
                lambda: (
                    (snapshot := reader.read()).running_requests > 0
                    and time.time_ns() - snapshot.last_step_unix_ns > 2_000_000_000
                    and snapshot
                )
            )
        except TimeoutError as error:
            last, told = reader.read(), {pid: command_of(pid) for pid in workers}
            error.add_note(f"{last.running_requests} run, steps {last.counters['steps']}, stopped {worker} of {told}")
            raise
        beating = stuck.heartbeat_unix_ns - stuck.last_step_unix_ns
    finally:
        os.kill(worker, signal.SIGCONT)
    thread.join(SECONDS)
    after = wait_for(lambda: (snapshot := reader.read()).running_requests == 0 and snapshot)
    return {
        "engine_core": identity.pid != os.getpid(),
        "kind": identity.kind,
        "steps_before": before.counters["steps"],
        "stuck_running": stuck.running_requests,
        "stuck_used": int(stuck.state_counts[2]),
        "heartbeat_after_last_step_ns": beating,
        "served_after": served,
        "used_at_rest": int(after.state_counts[2]),
        "degraded": after.flags.degraded,
        "repairs": after.counters["repairs"],
        "writer_alive": reader.writer_alive(),
    }


def move_meanwhile(llm: Any) -> dict[str, Any]:
    """Runs are asked for one after the other while requests run; blocks of theirs are moved in the worker's process."""
    (path,) = MAPS.glob("*.kvmap")
    dice = random.Random(8)
    prompts = [
        {"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(dice.randrange(40, 160))]} for _ in range(24)
    ]
    parameters = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    served: list[list[list[int]]] = []
    enough = threading.Event()

    def go_on_serving() -> None:
        while not enough.is_set():
            served.append(tokens())

    thread = threading.Thread(target=go_on_serving, daemon=True)
    thread.start()
    runs: list[dict[str, Any]] = []
    deadline = time.monotonic() + SECONDS
    while sum(run["moved_blocks"] for run in runs) < MOVES_WANTED and time.monotonic() < deadline:
        runs.append(ask(path, CompactRequest(target=0.0, verify=True)))
    enough.set()
    thread.join()
    stock = tokens()
    return {
        "moved": sum(run["moved_blocks"] for run in runs),
        "verified": sum(run["details"]["verified_blocks"] for run in runs),
        "decisions": sorted({run["decision"] for run in runs}),
        "same_when_moved": all(one == stock for one in served),
    }


def ask_the_idle(llm: Any) -> dict[str, Any]:
    """An engine core without requests takes no steps, and answers all the same; then it is told to leave vLLM alone."""
    (path,) = MAPS.glob("*.kvmap")
    requests = {
        "plan": PlanRequest(target=0.0), "plan_soon_again": PlanRequest(target=0.5),
        "compact": CompactRequest(target=0.0, verify=True), "status": StatusRequest(),
        "relocation": RelocationRequest(on=True), "turn_off": TurnOffRequest(reason="the operator said so"),
    }  # fmt: skip
    copies = MapReader(path).read().counters["relocation_copies"]
    replies = {name: ask(path, request) for name, request in requests.items()}
    wait_for(lambda: not path.exists())
    sockets = [one.name for one in path.parent.iterdir() if one.suffix == SOCKET_SUFFIX]
    return {"idle": replies, "copies": copies, "sockets_left": sockets, "served_without_us": serve(llm)}


def ask(path: Path, request: Any) -> dict[str, Any]:
    """What the control socket beside this map says to this."""
    with socket.socket(socket.AF_UNIX) as connection, socket_address(socket_path(path)) as address:
        connection.settimeout(SECONDS)
        connection.connect(address)
        connection.sendall(encode_request(request))
        reply: dict[str, Any] = json.loads(connection.makefile("rb").readline())
    return reply


if __name__ == "__main__":
    main()
