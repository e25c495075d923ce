"""Program that reads a pickled checkpoint and writes its tensors as safetensors; `pickled_weights` runs it.

    python -I pickle_child.py < pytorch_model.bin > model.safetensors

It is a file of its own, because it imports torch and nothing else, and has no environment and no other descriptors.
torch reads the pickle with ``weights_only``, which calls nothing that a pickle names. In case that fails one day, the
kernel bounds the process before the first byte is read: memory, processor time and file size by limits, writing of
files by Landlock, sockets and programs by seccomp. Kernels without the last two are no reason to refuse a checkpoint.

The exit code is 0, or REFUSED with the reason on standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import platform
import re
import resource
import struct
import sys
import zipfile

import torch

REFUSED = 3
SPARE_BYTES = 1 << 30
"""Memory beyond the size of the checkpoint, for torch itself and for one tensor that is copied."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SECCOMP = {
    "x86_64": (317, 0xC000003E, (41, 42, 49, 53, 59, 101, 310, 311, 321, 322, 425)),
    "aarch64": (277, 0xC00000B7, (198, 199, 200, 203, 117, 221, 270, 271, 280, 281, 425)),
}
"""By machine: number of seccomp, its AUDIT_ARCH, and the calls to deny: sockets, programs, tracing, bpf, io_uring."""
_LANDLOCK_WRITES = 0x1FF3
"""All rights of Landlock's first version but the two to read: to run, write, remove and make files."""


def limit(size: int) -> None:
    """Bound what this process can do with a checkpoint of ``size`` bytes."""
    with open("/proc/self/statm") as sizes:
        mapped = int(sizes.read().split()[0]) * resource.getpagesize()
    seconds = 60 + size // 20_000_000
    for kind, value in (
        (resource.RLIMIT_AS, mapped + 2 * size + SPARE_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 2 * size + (1 << 20)),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG with SIGKILL: the thread that waits for this process is its parent
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which neither filter may be set
    rules = libc.syscall(444, struct.pack("<Q", _LANDLOCK_WRITES), 8, 0)
    if rules >= 0:
        libc.syscall(446, rules, 0)
    if platform.machine() in _SECCOMP:
        call, machine, denied = _SECCOMP[platform.machine()]
        tests = [(0x35, 0x40000000), *((0x15, number) for number in denied)]  # x32's calls; then each by its number
        code = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
        code += [(test, len(tests) - i, 0, number) for i, (test, number) in enumerate(tests)]
        code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allow; EPERM
        program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
        libc.syscall(call, 1, 1, struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(program)))  # for all threads


def read(path: str, size: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint. Raises ValueError for anything else."""
    # torch maps the records of an archive as they are stored, and would take compressed bytes for numbers.
    mapped = zipfile.is_zipfile(path)
    if mapped:
        with zipfile.ZipFile(path) as archive:
            mapped = all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(state, dict) or not state:
        raise ValueError("it holds no state_dict")
    total = 0
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{str(name)[:80]} is of type {type(tensor).__name__}; only tensors are read")
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype} and layout {tensor.layout}, which is not supported")
        claimed = tensor.numel() * tensor.element_size()
        total += claimed
        if claimed > tensor.untyped_storage().nbytes() or total > 2 * size:
            raise ValueError(f"{name} claims {claimed / 1e9:.1f} GB, more than the file of {size / 1e9:.1f} GB holds")
    return state


def write(tensors: dict[str, torch.Tensor], out: int) -> None:
    """Write a safetensors file, one tensor at a time."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def main() -> int:
    """Convert standard input to standard output."""
    size = os.fstat(0).st_size
    limit(size)
    try:
        write(read("/proc/self/fd/0", size), 1)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        problem = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
        reason = f"it wants {wanted[1]}" if wanted else problem[1] if problem else str(error).strip()
        reason += ", and only tensors are read"
    except (Exception, MemoryError) as error:  # whatever torch raises for a broken archive
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    else:
        return 0
    with contextlib.suppress(OSError):
        sys.stderr.write(reason[:1000])
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
