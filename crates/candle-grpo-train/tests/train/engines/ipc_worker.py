"""The worker of a fake vLLM server that reads weights from memory of the policy.

It reads requests from its input, as lines of JSON, and answers each with a line. Like vLLM 0.32, it reads the
handles with Python's `pickle`, opens the memory once in an update, copies the weights out before it answers, and
closes the memory at the end of the update. The memory is that of a GPU or, if there is an argument, a file in this
folder.
"""

import base64
import ctypes
import fcntl
import io
import json
import os
import pickle
import sys

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
# Of PyTorch 2.13.
HANDLE_VERSION = 3
HANDLE_BYTES = 64


class Reader(pickle.Unpickler):
    """Reads the names of PyTorch as texts."""

    def find_class(self, module, name):
        return f"{module}.{name}"


class Files:
    def __init__(self, folder):
        self.folder = folder

    def uuid(self):
        return "f" * 8 + "-" + "-".join(["0" * 4] * 3) + "-" + "1" * 12

    def open(self, handle):
        number = int.from_bytes(handle[:8], "little")
        file = open(os.path.join(self.folder, str(number)), "rb")
        # The policy may only free memory that is closed.
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def read(self, file, size):
        # Past Python's buffer, which has the bytes of the message before.
        return os.pread(file.fileno(), size, 0)

    def close(self, file):
        file.close()


class Gpu:
    def __init__(self):
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:  # The emulated GPU has this name only.
            self.cuda = ctypes.CDLL("libcuda.so")
        self.device = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}")

    def uuid(self):
        uuid = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", uuid, self.device)
        text = bytes(uuid).hex()
        return "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])

    def open(self, handle):
        class Handle(ctypes.Structure):
            _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]

        pointer = ctypes.c_uint64()
        raw = Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), raw, 1)
        return pointer

    def read(self, pointer, size):
        buffer = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoHAsync_v2", buffer, pointer, ctypes.c_size_t(size), None)
        self.call("cuStreamSynchronize", None)
        return buffer.raw

    def close(self, pointer):
        self.call("cuIpcCloseMemHandle", pointer)


class Worker:
    def __init__(self, memory):
        self.memory = memory
        # The arguments of the open memory, and the memory.
        self.key = None
        self.opened = None

    def close(self):
        if self.key is not None:
            self.memory.close(self.opened)
            self.key = self.opened = None

    def rebuild(self, arguments):
        (kind, size, stride, offset, storage, dtype, _device, handle, size_bytes, offset_bytes, requires_grad,
         counter, counter_offset, event, waits) = arguments
        expected = ("torch.Tensor", (1,), 0, "torch.storage.TypedStorage", "torch.uint8", 0, False)
        found = (kind, stride, offset, storage, dtype, offset_bytes, requires_grad)
        if found != expected or size != (size_bytes,) or counter_offset != 0 or waits is not False:
            raise ValueError(f"arguments: {arguments}")
        if not all(isinstance(text, bytes) for text in (handle, counter, event)):
            raise TypeError("a handle that is not bytes")
        if handle[0] > HANDLE_VERSION or handle[1:2] != b"c" or len(handle) != 2 + HANDLE_BYTES:
            raise ValueError(f"handle: {handle}")
        if self.key != arguments:
            self.close()
            self.opened = self.memory.open(handle[2:])
            self.key = arguments
        return size_bytes

    def update(self, info):
        pickled = base64.b64decode(info["ipc_handles_pickled"], validate=True)
        handles = Reader(io.BytesIO(pickled)).load()
        uuid = self.memory.uuid()
        if uuid not in handles:
            raise ValueError(f"IPC handle not found for GPU UUID {uuid}. Available UUIDs: {list(handles)}")
        size = self.rebuild(handles[uuid])
        sizes = info["tensor_sizes"]
        if sum(sizes) > size:
            raise ValueError(f"{sum(sizes)} bytes of a buffer of {size}")
        content = self.memory.read(self.opened, sum(sizes))
        weights = {}
        for name, dtype, shape, count in zip(
            info["names"], info["dtype_names"], info["shapes"], sizes, strict=True
        ):
            elements = 1
            for length in shape:
                elements *= length
            if elements * ITEM_BYTES[dtype] != count:
                raise ValueError(f"{name}: {count} bytes for the shape {shape} of {dtype}")
            weights[name] = base64.b64encode(content[:count]).decode()
            content = content[count:]
        return weights


def main():
    worker = Worker(Files(sys.argv[1]) if len(sys.argv) > 1 else Gpu())
    for line in sys.stdin:
        try:
            info = json.loads(line)
            answer = {"weights": {}} if info is None else {"weights": worker.update(info)}
            if info is None:
                worker.close()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


main()
