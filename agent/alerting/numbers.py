"""The named numbers that rules may be made of."""

from __future__ import annotations

from typing import Final

from alerts.readings import Catalogue, NamedNumber
from alerts.units import Unit

POOL_LABELS: Final = ("engine_id", "model", "pool", "rank")
AGENT_LABELS: Final = ("agent",)
DEVICE_LABELS: Final = ("gpu",)

NUMBERS: Final = {
    # Of an engine and its map; known as long as the map is there
    "engine_gone": NamedNumber(Unit.FLAG, "the engine ended without closing its map"),
    "engine_stalled": NamedNumber(Unit.FLAG, "requests run and no step ends"),
    "map_stale": NamedNumber(Unit.FLAG, "the map gives no numbers of now, or cannot be read"),
    "map_torn_ratio": NamedNumber(Unit.RATIO, "share of the reads of the last 30 s that gave no whole snapshot"),
    "map_degraded": NamedNumber(Unit.FLAG, "the shim has stopped following the pool"),
    # Of what is in the pool; unknown while its map tells nothing of now
    "pool_fragmentation_ratio": NamedNumber(Unit.RATIO, "F: 1 - longest run / total, over free and cached blocks"),
    "pool_used_ratio": NamedNumber(Unit.RATIO, "used and pinned blocks of the usable ones"),
    "pool_exhaustion_seconds": NamedNumber(
        Unit.SECONDS, "until no block is allocatable, by the trend; a day where that is not in sight"
    ),
    "pool_headroom_missing_ratio": NamedNumber(Unit.RATIO, "share of the headroom that is not allocatable any more"),
    "pool_admission_blocked": NamedNumber(Unit.FLAG, "requests wait, and too few blocks are left for a new sequence"),
    "pool_leaked_blocks": NamedNumber(Unit.BLOCKS, "used blocks while no request runs or waits, else 0"),
    "pool_oldest_pinned_seconds": NamedNumber(Unit.SECONDS, "since the longest pinned block was touched; 0: none is"),
    "pool_tail_waste_ratio": NamedNumber(Unit.RATIO, "empty token slots of those in used blocks"),
    "pool_tail_waste_bytes": NamedNumber(Unit.BYTES, "the same in bytes"),
    "pool_accounting_residual_blocks": NamedNumber(Unit.BLOCKS, "by which the engine's counts and states differ"),
    "engine_running_requests": NamedNumber(Unit.COUNT, "requests that run"),
    "engine_waiting_requests": NamedNumber(Unit.COUNT, "requests that wait"),
    "engine_metrics_disagreement": NamedNumber(
        Unit.RATIO, "largest difference between map and the engine's own metrics that lasts; unknown without metrics"
    ),
    # Rates, from the counters of the map
    "preemptions_per_minute": NamedNumber(Unit.PER_MINUTE, "running sequences preempted, over the last minute"),
    "allocation_failures_per_minute": NamedNumber(Unit.PER_MINUTE, "allocations refused, over the last minute"),
    "prefix_evictions_per_allocation": NamedNumber(
        Unit.RATIO, "cached blocks evicted per block allocated, over two minutes"
    ),
    "prefix_evicted_idle_seconds": NamedNumber(
        Unit.SECONDS, "median time that those blocks had been idle, rounded up to a bucket; a day where none was"
    ),
    "prefix_hit_ratio": NamedNumber(Unit.RATIO, "prompt tokens found in the prefix cache, over two minutes"),
    "prefix_hit_lost_ratio": NamedNumber(Unit.RATIO, "share of the best hit ratio of the last hour that is lost"),
    # Of what the agent does about fragmentation
    "compaction_left_alone": NamedNumber(Unit.FLAG, "the agent has done what it may, or may do nothing"),
    "pool_consumers": NamedNumber(Unit.COUNT, "consumers of contiguous blocks, declared or found"),
    "compaction_verify_failed": NamedNumber(Unit.FLAG, "a check of moved blocks failed, and moving is off"),
    "compaction_run_failed": NamedNumber(Unit.FLAG, "the last run failed, and fragmentation is up"),
    "compaction_undone_runs": NamedNumber(
        Unit.COUNT, "runs in a row that failed or did not last, while fragmentation is up; else 0"
    ),
    # Of devices and host memory; unknown where nobody may be asked
    "nvml_failed": NamedNumber(Unit.FLAG, "NVML is there and does not work, or does not answer"),
    "device_lost": NamedNumber(Unit.FLAG, "the device failed, needs a reset, or is not listed any more"),
    "device_memory_free_ratio": NamedNumber(Unit.RATIO, "free memory of the device"),
    "device_memory_unattributed_ratio": NamedNumber(Unit.RATIO, "memory of the device that nobody visible holds"),
    "host_memory_available_ratio": NamedNumber(Unit.RATIO, "host memory that can be had without swapping"),
    "cgroup_memory_used_ratio": NamedNumber(
        Unit.RATIO, "working set of the engine's control group, of its tightest memory limit"
    ),
    # Of the agent itself
    "agent_sample_late_seconds": NamedNumber(Unit.SECONDS, "by which the last sample came, or is, too late"),
    "agent_notifications_failing_seconds": NamedNumber(
        Unit.SECONDS, "for how long something that is to be sent has not come through, at the worst receiver"
    ),
    "agent_notifications_refused": NamedNumber(Unit.FLAG, "the last message to some receiver was given up for good"),
    "agent_unreadable_maps": NamedNumber(Unit.COUNT, "maps and folders that are there and cannot be read"),
}
TEXTS: Final = frozenset({"reason", "decision", "consumers", "disagreement", "sink", "unreadable"})

CATALOGUE: Final = Catalogue(NUMBERS, frozenset((*POOL_LABELS, *AGENT_LABELS, *DEVICE_LABELS)), TEXTS)
