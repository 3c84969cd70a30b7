"""The system calls on memory that Python has no function for."""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value


def make_private(address: int, nbytes: int, fd: int, *, populate: bool) -> None:
    """Turn a shared mapping of `fd` into a private one, at the same address and with the same contents.

    Writes that other processes make to the descriptor's memory afterwards no longer show here. Local writes are not
    lost: those made before are in the shared pages that the private mapping begins with, later ones go to copies.
    Without `populate` a page is copied when it is first written to here, and until then shows others' writes.
    """
    if not nbytes:
        return
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc.mmap(address, nbytes, protection, flags, fd, 0) == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "a shared mapping could not be made private")
    if populate and _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:  # before Linux 5.14
        for page in range(address, address + nbytes, mmap.PAGESIZE):
            byte = ctypes.c_ubyte.from_address(page)
            byte.value = byte.value


def buffer_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """The memory at `address` as a buffer that a socket can send from and receive into."""
    return (ctypes.c_char * nbytes).from_address(address)


def anonymous(nbytes: int, name: str = "phalanx") -> int:
    """A descriptor of fresh zeroed memory without a name in any file system: nothing is left after a kill."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd
