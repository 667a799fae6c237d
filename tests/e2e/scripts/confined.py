"""Runs a command as in a container whose seccomp profile denies a look into other processes: confined.py COMMAND [ARG]...

Denied with EPERM: ptrace, process_vm_readv, process_vm_writev, pidfd_getfd. Proves it before it starts the command.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

CALLS = {"x86_64": (101, 310, 311, 438), "aarch64": (117, 270, 271, 438)}
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM

libc = ctypes.CDLL(None, use_errno=True)
calls = CALLS[platform.machine()]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


code = struct.pack("=HBBI", LOAD, 0, 0, 0)  # the number of the system call
for at, call in enumerate(calls):
    code += struct.pack("=HBBI", EQUAL, len(calls) - at, 0, call)
code += struct.pack("=HBBI", RETURN, 0, 0, ALLOW) + struct.pack("=HBBI", RETURN, 0, 0, DENY)
program = Program(len(code) // 8, code)
if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, ctypes.byref(program), 0, 0):
    sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
assert libc.ptrace(0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
os.execvp(sys.argv[1], sys.argv[1:])
