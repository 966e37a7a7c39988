"""CudaDriver: calls libcuda by ctypes, for what torch does not offer: new streams instead of those of its pool, events
of a device that is not the current one, the device that an address belongs to, and the registering of memory."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_READY = 0, 1, 2, 600
INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED = 101, 800, 801

_NEEDED = {41: "unified addressing", 91: "host addresses for registered memory"}

_PINNED, _POSIX_DESCRIPTOR, _AT_DEVICE, _RECOMMENDED = 1, 1, 1, 1
_READ, _READ_WRITE = 1, 3

_POINTER_MEMORY_TYPE, _POINTER_ORDINAL, _POINTER_START, _POINTER_NBYTES = 2, 9, 11, 12
_DEVICE_MEMORY = 2


class DriverError(RuntimeError):
    """A call of the driver failed; the message has its name and the driver's name of the error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _MemoryLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", c_int), ("id", c_int))


class _MemoryProperties(ctypes.Structure):
    """CUmemAllocationProp; fields that are not set are 0."""

    _fields_ = (
        ("kind", c_int),
        ("handle_types", c_int),
        ("location", _MemoryLocation),
        ("windows", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _MemoryAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _MemoryLocation), ("flags", c_int))


class CudaDriver:
    """The library. Raises OSError where there is none, and DriverError for each call that fails. Callers pass numbers
    as ctypes objects, such as c_size_t(n): ctypes would pass a plain int as 32 bits."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(library)
        self.call("cuInit", c_uint(0))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function. Raises DriverError if it does not succeed."""
        status = self.status(name, *arguments)
        if status != SUCCESS:
            text = c_char_p()
            self._cuda.cuGetErrorName(c_int(status), byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})", status)

    def status(self, name: str, *arguments: Any) -> int:
        """Calls a function, and returns its status."""
        return int(getattr(self._cuda, name)(*arguments))

    def version(self) -> int:
        """Returns the newest version of CUDA that it serves, 13000 for 13.0."""
        value = c_int()
        self.call("cuDriverGetVersion", byref(value))
        return value.value

    def count(self) -> int:
        """Returns how many devices it shows to this process."""
        value = c_int()
        self.call("cuDeviceGetCount", byref(value))
        return value.value

    def device_name(self, device: int) -> str:
        """Returns the product's name."""
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, c_int(256), c_int(device))
        return text.value.decode(errors="replace")

    def memory_bytes(self, device: int) -> int:
        """Returns the size of a device's memory."""
        value = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(value), c_int(device))
        return value.value

    def attribute(self, number: int, device: int = 0) -> int:
        """Returns an attribute of a device, by the number that cuda.h gives it."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), c_int(number), c_int(device))
        return value.value

    def lacks(self, device: int) -> list[str]:
        """Returns the features that a device lacks and cannot be used without."""
        return [name for number, name in _NEEDED.items() if not self.attribute(number, device)]

    def uuid(self, device: int) -> str:
        """Returns a device's name for all processes, as nvidia-smi prints it."""
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", byref(raw), c_int(device))
        text = bytes(raw).hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def reads(self, device: int) -> list[int]:
        """Returns the devices whose memory this one reads: itself, and its peers among those shown to this process. If
        the driver cannot report whether one is a peer, it counts as none."""
        found, value = [device], c_int()
        for other in range(self.count()):
            asked = byref(value), c_int(device), c_int(other)
            if other != device and self.status("cuDeviceCanAccessPeer", *asked) == SUCCESS and value.value:
                found.append(other)
        return found

    def bus_id(self, device: int) -> str:
        """Returns its place on the PCI bus, as in /sys/bus/pci/devices."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, c_int(32), c_int(device))
        return text.value.decode().lower()

    def primary_context(self, device: int) -> c_void_p:
        """Returns the context of a device that this process shares with torch, which is made if there is none yet."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
        return context

    def enter(self, context: c_void_p) -> None:
        """Makes this the thread's current context, until `leave`."""
        self.call("cuCtxPushCurrent_v2", context)

    def leave(self) -> None:
        """Makes the previous context current again."""
        self.status("cuCtxPopCurrent_v2", byref(c_void_p()))

    def ordinal_at(self, address: int) -> int | None:
        """Returns the device whose memory has this address; None if it is no device's. Needs a current context."""
        kind, ordinal = c_uint(), c_int()
        for value, attribute in ((kind, _POINTER_MEMORY_TYPE), (ordinal, _POINTER_ORDINAL)):
            pointer = ctypes.c_ulonglong(address)
            status = self.status("cuPointerGetAttribute", byref(value), c_int(attribute), pointer)
            if status == INVALID_VALUE:  # an address that is not known to the driver
                return None
            if status != SUCCESS:
                raise DriverError(f"cuPointerGetAttribute: {status}", status)
        return ordinal.value if kind.value == _DEVICE_MEMORY else None

    def allocation_at(self, address: int) -> tuple[int, int]:
        """Returns the first address and the bytes of the allocation that a device's address lies in."""
        start, nbytes = ctypes.c_ulonglong(), ctypes.c_size_t()
        for value, attribute in ((start, _POINTER_START), (nbytes, _POINTER_NBYTES)):
            self.call("cuPointerGetAttribute", byref(value), c_int(attribute), ctypes.c_ulonglong(address))
        return start.value, nbytes.value

    # ------------------------------------------------------------------------------- memory that processes share

    def shared_bytes(self, device: int, nbytes: int) -> int:
        """Returns how many bytes shared memory for `nbytes` takes."""
        unit = c_size_t()
        number = c_int(_RECOMMENDED)
        self.call("cuMemGetAllocationGranularity", byref(unit), byref(_properties(device)), number)
        return -(-nbytes // unit.value) * unit.value

    def create_shared(self, device: int, nbytes: int) -> int:
        """Returns the handle of new memory; `nbytes` as `shared_bytes` returns."""
        handle = c_ulonglong()
        self.call("cuMemCreate", byref(handle), c_size_t(nbytes), byref(_properties(device)), c_ulonglong(0))
        return handle.value

    def export_shared(self, handle: int) -> int:
        """Returns a new descriptor of it."""
        descriptor = c_int(-1)
        self.call(
            "cuMemExportToShareableHandle",
            byref(descriptor),
            c_ulonglong(handle),
            c_int(_POSIX_DESCRIPTOR),
            c_ulonglong(0),
        )
        return descriptor.value

    def import_shared(self, descriptor: int) -> int:
        """Returns a handle of memory that another process has exported."""
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), c_int(_POSIX_DESCRIPTOR))
        return handle.value

    def map_shared(self, device: int, handle: int, nbytes: int, *, writable: bool) -> int:
        """Maps it, for this device alone, and returns its address. Needs a current context."""
        address = c_ulonglong()
        none, size = c_ulonglong(0), c_size_t(nbytes)
        self.call("cuMemAddressReserve", byref(address), size, c_size_t(0), none, none)
        mapped = False
        try:
            self.call("cuMemMap", address, size, c_size_t(0), c_ulonglong(handle), none)
            mapped = True
            access = _MemoryAccess(_MemoryLocation(_AT_DEVICE, device), _READ_WRITE if writable else _READ)
            self.call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
        except DriverError:
            if mapped:
                self.status("cuMemUnmap", address, size)
            self.status("cuMemAddressFree", address, size)
            raise
        return address.value

    def unmap_shared(self, address: int, nbytes: int) -> None:
        """Undoes `map_shared`."""
        self.call("cuMemUnmap", c_ulonglong(address), c_size_t(nbytes))
        self.call("cuMemAddressFree", c_ulonglong(address), c_size_t(nbytes))

    def release_shared(self, handle: int) -> None:
        """Gives a handle back. The memory lasts as long as it is mapped or exported anywhere."""
        self.call("cuMemRelease", c_ulonglong(handle))


def _properties(device: int) -> _MemoryProperties:
    return _MemoryProperties(_PINNED, _POSIX_DESCRIPTOR, _MemoryLocation(_AT_DEVICE, device))
