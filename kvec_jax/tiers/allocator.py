"""Memory that was freed, and is still counted as the process's."""

import ctypes


def give_back() -> None:
    """Gives memory that was freed back to the operating system, where the C library has a way to say so (glibc).

    Reading a prompt and compiling free many buffers of some megabytes, which the allocator of the C library would keep.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
