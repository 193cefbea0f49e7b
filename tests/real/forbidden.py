"""Runs a program that may not read other processes' memory, as in a container.

python tests/real/forbidden.py PROGRAM ARGUMENT... puts a seccomp filter in front of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

#: process_vm_readv, and what seccomp calls the machine.
_CALLS = {"x86_64": (310, 0xC000003E), "aarch64": (270, 0xC00000B7)}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid() -> None:
    """Let the system call fail with EPERM, in this process and all that it starts."""
    number, machine = _CALLS[platform.machine()]
    steps = [
        (_LOAD, 0, 0, 4),  # the machine
        (_JUMP_IF_EQUAL, 0, 3, machine),
        (_LOAD, 0, 0, 0),  # the call
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


if __name__ == "__main__":
    forbid()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
