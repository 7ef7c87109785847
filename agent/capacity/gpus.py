"""Memory of real cards: what CUDA offers of it, of which engines take their share, and where the figure is from.

`cuda_gib` is the total that PyTorch prints ("GPU 0 has a total capacity of ... GiB"), the least that was seen;
`driver_mib` is nvidia-smi's total. Both vary by some tenths of a per cent with driver and ECC. Where only the driver's
is known, the planner says that it estimates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine_shim.errors import SettingsError

MIB, GIB = 1 << 20, 1 << 30
CONTEXT_SHARE = 0.015  # of nvidia-smi's total, kept back from CUDA on cards where both figures are known (0.4 to 4 %)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of card. `unified`: it shares the host's memory, so that only the operator knows its part."""

    name: str
    driver_mib: int | None = None
    cuda_gib: float | None = None
    unified: bool = False
    source: str

    @property
    def memory_bytes(self) -> int | None:
        """What CUDA offers; None for cards that share the host's memory."""
        if self.cuda_gib is not None:
            return int(self.cuda_gib * GIB)
        return None if self.driver_mib is None else int(self.driver_mib * MIB * (1 - CONTEXT_SHARE))

    @property
    def estimated(self) -> bool:
        """Whether `memory_bytes` is taken from the driver's total alone."""
        return self.cuda_gib is None and self.driver_mib is not None


_BOTH = "public logs: nvidia-smi's total and PyTorch's out-of-memory messages"
_DRIVER = "public logs: nvidia-smi's total"
GPUS: Mapping[str, Gpu] = {
    one.name: one
    for one in (
        Gpu(name="T4", driver_mib=15360, cuda_gib=14.56, source=_BOTH),
        Gpu(name="V100-16GB", driver_mib=16384, cuda_gib=15.77, source=_BOTH),
        Gpu(name="V100-32GB", driver_mib=32768, cuda_gib=31.73, source=_BOTH),
        Gpu(name="A10", driver_mib=23028, cuda_gib=22.06, source=_BOTH),
        Gpu(name="A10G", driver_mib=23028, cuda_gib=22.06, source=_BOTH),
        Gpu(name="A30", driver_mib=24576, cuda_gib=23.49, source=_BOTH),
        Gpu(name="A40", driver_mib=46068, cuda_gib=44.34, source=_BOTH),
        Gpu(name="A100-40GB", driver_mib=40960, cuda_gib=39.38, source=_BOTH),
        Gpu(name="A100-80GB", driver_mib=81920, cuda_gib=79.14, source=_BOTH),
        Gpu(name="A800-80GB", driver_mib=81920, cuda_gib=79.14, source=_BOTH),
        Gpu(name="RTX-A6000", driver_mib=49140, cuda_gib=47.40, source=_BOTH),
        Gpu(name="L4", driver_mib=23034, cuda_gib=22.03, source=_BOTH),
        Gpu(name="L20", driver_mib=46068, source=_DRIVER),
        Gpu(name="L40S", driver_mib=46068, cuda_gib=44.39, source=_BOTH),
        Gpu(name="RTX-3090", driver_mib=24576, cuda_gib=23.56, source="vllm-project/vllm#10517 and #14447: 23.58 GiB"),
        Gpu(name="RTX-4090", driver_mib=24564, cuda_gib=23.49, source=_BOTH),
        Gpu(name="RTX-5090", driver_mib=32607, cuda_gib=31.36, source="Wan-Video/Wan2.1#465: 31.37 GiB"),
        Gpu(name="RTX-6000-Ada", driver_mib=49140, cuda_gib=47.40, source=_BOTH),
        Gpu(name="RTX-PRO-6000", driver_mib=97887, cuda_gib=94.97, source=_BOTH),
        Gpu(
            name="H100-80GB", driver_mib=81559, cuda_gib=79.10, source="vllm-project/vllm#10511: 79.22 GiB; nvidia-smi"
        ),
        Gpu(name="H800-80GB", driver_mib=81559, cuda_gib=79.10, source=_BOTH),
        Gpu(name="H100-NVL", driver_mib=95830, source=_DRIVER),
        Gpu(name="H20", driver_mib=97871, source=_DRIVER),
        Gpu(name="H200", driver_mib=143771, cuda_gib=139.72, source=_BOTH + ": 139.72 to 139.83 GiB"),
        Gpu(name="B200", driver_mib=183359, cuda_gib=178.35, source=_BOTH),
        Gpu(name="MI300X", cuda_gib=191.98, source="public logs: PyTorch on ROCm, out-of-memory messages"),
        Gpu(name="GB10", unified=True, source="shares the host's memory; NVML reports none (gpud#1170)"),
        Gpu(name="Apple-M", unified=True, source="shares the host's memory"),
    )
}

SHORT = {"h100": "h10080gb"}  # the common card of a name that longer names begin with


def find_gpu(name: str) -> Gpu:
    """A card by name, however it is spelt; SettingsError lists the names, or those that fit more than one."""
    wanted = _plain(name)
    wanted = SHORT.get(wanted, wanted)
    known = {_plain(one.name): one for one in GPUS.values()}
    if wanted in known:
        return known[wanted]
    near = [one for plain, one in known.items() if wanted and plain.startswith(wanted)]
    near = near or [one for plain, one in known.items() if wanted and wanted in plain]
    near = near or [
        one for plain, one in known.items() if wanted.startswith(plain) and _tells_the_same(wanted[len(plain) :], one)
    ]
    if len(near) == 1:
        return near[0]
    if near:
        raise SettingsError(f"gpu {name!r} may be {' or '.join(one.name for one in near)}; name one")
    raise SettingsError(f"gpu {name!r} is not in the table; use --gpu-memory GIB, or one of {', '.join(GPUS)}")


def _tells_the_same(rest: str, gpu: Gpu) -> bool:
    """Whether what follows a card's name is its own memory, form, or a kind that has as much.

    Anything else may be another card (A100X is no A10) or a part of this one (a MIG slice), with other memory.
    """
    if rest in ("nvl", "ti", "d"):
        return True
    size = re.fullmatch(r"(\d{1,4})gb?", rest)
    memory = gpu.memory_bytes
    return size is not None and memory is not None and abs(int(size[1]) - memory / GIB) < 0.1 * memory / GIB


def _plain(name: str) -> str:
    """Without vendor, separators, form factor and case: "NVIDIA A100-SXM4-80GB" is a100 80gb here."""
    text = re.sub(r"nvidia|geforce|amd|instinct|tesla|sxm\d?|pcie|hbm\d?e?", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", text)
