"""Reads one device, or one MIG slice, through NVML: each question may be refused by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agent.devices import nvml_errors
from agent.devices.model import DeviceMemory, DeviceProcess, DeviceSample, DeviceState, LibraryState
from agent.devices.nvml_errors import Meaning, meaning_of

Say = Callable[[str], None]
SystemMemory = Callable[[], tuple[int, int] | None]  # total and available bytes of the host, or None

_ENDS_THE_DEVICE = (DeviceState.LOST, DeviceState.RESET_REQUIRED, DeviceState.DEGRADED)
_PROCESS_LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
)
_MAX_SLICES = 64


class Refused(Exception):
    """NVML said no to one question; `code` is its error."""

    def __init__(self, code: int, meaning: Meaning) -> None:
        super().__init__(meaning.text)
        self.code, self.meaning = code, meaning


@dataclass(frozen=True, slots=True)
class Asker:
    """Calls functions of the binding by name; `say` is told which, so that a call that hangs can be named."""

    nvml: Any  # the module pynvml, which has no types
    say: Say

    def __call__(self, function: str, *arguments: Any, about: str = "") -> Any:
        """The result. Raises Refused for any error of NVML's, and where the binding lacks the function."""
        self.say(f"{function}{' for ' + about if about else ''}")
        call = getattr(self.nvml, function, None)
        if call is None:
            raise Refused(nvml_errors.FUNCTION_NOT_FOUND, meaning_of(nvml_errors.FUNCTION_NOT_FOUND, function))
        try:
            answer = call(*arguments)
            return _printable(answer) if isinstance(answer, str) else answer
        except self.nvml.NVMLLibraryMismatchError as error:  # no NVMLError, unlike all others
            code = nvml_errors.FUNCTION_NOT_FOUND
            raise Refused(code, meaning_of(code, function)) from error
        except self.nvml.NVMLError as error:
            raise Refused(error.value, meaning_of(error.value, f"{function}: {_words(error)}")) from error
        except UnicodeDecodeError as error:  # a name that is no text
            raise Refused(nvml_errors.UNKNOWN, meaning_of(nvml_errors.UNKNOWN, f"{function}: no text")) from error


def _words(error: Exception) -> str:
    """NVML's own words, which it gives as bytes that may be no text."""
    try:
        return _printable(str(error))
    except UnicodeDecodeError:
        return "an error without words"


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)


@dataclass(slots=True)
class _Trouble:
    """What was refused in reading one device."""

    reasons: list[str] = field(default_factory=list)

    def note(self, error: Refused) -> None:
        """Keep the reason; raises it again where it is about the device as a whole."""
        if error.meaning.device in _ENDS_THE_DEVICE:
            raise error
        self.reasons.append(str(error))


def read_device(ask: Asker, index: int, known: DeviceSample | None, system: SystemMemory) -> DeviceSample:
    """One device with its slices. Never raises; what is refused is in state and reason.

    `known` is what was told of that index before, by which a device that is lost now can still be named.
    """
    about = f"GPU {index}"
    blank = DeviceSample(index, None, None, None, DeviceState.FAILED, "")
    if known is not None:
        blank = replace(blank, uuid=known.uuid, name=known.name, bus_id=known.bus_id)
    try:
        handle = ask("nvmlDeviceGetHandleByIndex", index, about=about)
        return _read_handle(ask, handle, blank, about, system)
    except Refused as error:
        return replace(blank, state=error.meaning.device, reason=str(error))


def _read_handle(ask: Asker, handle: Any, blank: DeviceSample, about: str, system: SystemMemory) -> DeviceSample:
    trouble = _Trouble()
    sample = replace(
        blank,
        uuid=_maybe(ask, trouble, "nvmlDeviceGetUUID", handle, about=about) or blank.uuid,
        name=blank.name or _maybe(ask, trouble, "nvmlDeviceGetName", handle, about=about),
        bus_id=blank.bus_id or _bus_id(ask, handle, about),
    )
    slices: tuple[DeviceSample, ...] = ()
    try:
        memory, refusal = _memory(ask, handle, about)
        processes = _processes(ask, handle, about, trouble)
        mig = _mig_mode(ask, handle, about)
        if mig or (mig is None and refusal is not None and refusal.meaning.device is DeviceState.NO_PERMISSION):
            slices = tuple(_slices(ask, handle, sample.index, about))
    except Refused as error:
        # Its name is known by now, which makes a better report than the bare index.
        return replace(sample, state=error.meaning.device, reason=str(error))
    state, reasons = DeviceState.OK, trouble.reasons
    if refusal is not None:
        state, reasons = refusal.meaning.device, [str(refusal), *reasons]
        if state is DeviceState.NOT_SUPPORTED and (host := system()) is not None:
            total, available = host
            memory = DeviceMemory(total, total - available, available, None, "system")
            state = DeviceState.UNIFIED
            reasons[0] = "NVML tells no memory for this device, which shares the host's: figures are of the whole host"
    elif reasons:
        state = DeviceState.PARTIAL
    return replace(
        sample,
        state=state,
        reason="; ".join(reasons),
        memory=memory,
        processes=processes,
        mig=bool(slices) if mig is None and slices else mig,
        slices=slices,
    )


def _memory(ask: Asker, handle: Any, about: str) -> tuple[DeviceMemory | None, Refused | None]:
    """Version 2, which tells the reserved part; drivers that lack it, version 1. A refusal of both is returned."""
    refusal: Refused | None = None
    for version in (2, 1):
        arguments = (ask.nvml.nvmlMemory_v2,) if version == 2 else ()
        try:
            told = ask("nvmlDeviceGetMemoryInfo", handle, *arguments, about=about)
        except Refused as error:
            if error.meaning.device in _ENDS_THE_DEVICE:
                raise
            refusal = error
            continue
        if told.total == 0:
            meaning = Meaning(LibraryState.OK, DeviceState.NOT_SUPPORTED, "NVML tells a memory of 0 bytes")
            refusal = Refused(nvml_errors.NOT_SUPPORTED, meaning)
            continue
        reserved = int(told.reserved) if version == 2 else None
        memory = DeviceMemory(int(told.total), int(told.used), int(told.free), reserved, f"nvml v{version}")
        return memory, None
    return None, refusal


def _processes(ask: Asker, handle: Any, about: str, trouble: _Trouble) -> tuple[DeviceProcess, ...] | None:
    """Every process once, also where it stands in several lists; None where even the first list is refused."""
    found: dict[int, DeviceProcess] = {}
    for number, names in enumerate(_PROCESS_LISTS):
        try:
            listed = _process_list(ask, handle, names, about)
        except Refused as error:
            if number == 0:
                trouble.note(error)
                return None
            if error.meaning.device in _ENDS_THE_DEVICE:
                raise
            continue  # no graphics, or no MPS, on this device: nothing that a compute process could hide in
        for one in listed:
            seen = found.get(one.pid)
            if seen is None or (one.used_bytes or 0) > (seen.used_bytes or 0):
                found[one.pid] = one
    return tuple(found[pid] for pid in sorted(found))


def _process_list(ask: Asker, handle: Any, names: tuple[str, ...], about: str) -> list[DeviceProcess]:
    for position, name in enumerate(names):
        for attempt in (1, 2):
            try:
                told = ask(name, handle, about=about)
            except Refused as error:
                if error.code == nvml_errors.INSUFFICIENT_SIZE and attempt == 1:
                    continue  # more processes came between the two calls that the binding makes
                if error.code == nvml_errors.FUNCTION_NOT_FOUND and position + 1 < len(names):
                    break
                raise
            return [_process(one) for one in told]
    return []


def _process(told: Any) -> DeviceProcess:
    instance = getattr(told, "gpuInstanceId", None)
    # The binding makes None of "not available" for the memory; the instance keeps NVML's all-ones.
    return DeviceProcess(int(told.pid), told.usedGpuMemory, None if instance in (None, 0xFFFFFFFF) else int(instance))


def _mig_mode(ask: Asker, handle: Any, about: str) -> bool | None:
    """Is the device cut into slices? None where it may not be asked; False where it has no such mode."""
    try:
        current, _ = ask("nvmlDeviceGetMigMode", handle, about=about)
    except Refused as error:
        if error.meaning.device in _ENDS_THE_DEVICE:
            raise
        return None if error.meaning.device is DeviceState.NO_PERMISSION else False
    return bool(current)


def _slices(ask: Asker, parent: Any, index: int, about: str) -> Iterator[DeviceSample]:
    try:
        count = min(int(ask("nvmlDeviceGetMaxMigDeviceCount", parent, about=about)), _MAX_SLICES)
    except Refused:
        return  # an older driver, or one that has no slices after all: the parent's own state says the rest
    for number in range(count):
        named = f"slice {number} of {about}"
        try:
            handle = ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, number, about=named)
        except Refused as error:
            if error.code == nvml_errors.NOT_FOUND:
                continue  # this place is empty
            yield DeviceSample(number, None, named, None, error.meaning.device, str(error), mig=False)
            continue
        yield _read_slice(ask, handle, number, named)


def _read_slice(ask: Asker, handle: Any, number: int, about: str) -> DeviceSample:
    trouble = _Trouble()
    sample = DeviceSample(number, None, about, None, DeviceState.OK, "", mig=False)
    try:
        sample = replace(sample, uuid=_maybe(ask, trouble, "nvmlDeviceGetUUID", handle, about=about))
        name = _maybe(ask, _Trouble(), "nvmlDeviceGetName", handle, about=about)
        instance = _maybe(ask, _Trouble(), "nvmlDeviceGetGpuInstanceId", handle, about=about)
        sample = replace(sample, name=name or about, gpu_instance=instance)
        memory, refusal = _memory(ask, handle, about)
        processes = _processes(ask, handle, about, trouble)
    except Refused as error:
        return replace(sample, state=error.meaning.device, reason=str(error))
    reasons = [str(refusal), *trouble.reasons] if refusal else trouble.reasons
    state = refusal.meaning.device if refusal else DeviceState.PARTIAL if reasons else DeviceState.OK
    return replace(sample, state=state, reason="; ".join(reasons), memory=memory, processes=processes)


def _bus_id(ask: Asker, handle: Any, about: str) -> str | None:
    told = _maybe(ask, _Trouble(), "nvmlDeviceGetPciInfo", handle, about=about)
    bus = getattr(told, "busId", None)
    return bus.decode("ascii", "replace") if isinstance(bus, bytes) else bus


def _maybe(ask: Asker, trouble: _Trouble, function: str, handle: Any, *, about: str) -> Any:
    """The answer, or None where it is refused; raises Refused only for a device that is broken as a whole."""
    try:
        return ask(function, handle, about=about)
    except Refused as error:
        trouble.note(error)
        return None
