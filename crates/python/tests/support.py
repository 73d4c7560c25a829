"""What the tests share: tensors without a tensor library, in host memory or on the CUDA driver's
device, and the golden vectors."""

import array
import ctypes
import functools
import json
import math
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import types

import prepared_kda

ROOT = pathlib.Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8, "float16": 2}
CODES = {"float32": "f", "bfloat16": "H", "int32": "i", "int64": "q", "float16": "H"}


class Driver:
    """The CUDA driver by ctypes: a GPU's, or the emulated one."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.emulated = hasattr(self.library, "kda_emulated_last_error")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def code(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")

    def allocate(self, size):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def write(self, address, data):
        if data:
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
            # From pageable memory the copy may still be under way, and other streams do not wait.
            self.call("cuStreamSynchronize", None)

    def read(self, address, size):
        data = ctypes.create_string_buffer(max(size, 1))
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw[:size]

    def stream(self):
        handle = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(handle), 1)
        return handle.value


@functools.lru_cache(maxsize=None)
def driver():
    """The driver, or None where none is."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if os.environ.get("KDA_REQUIRE_DRIVER"):
            raise
        return None
    return Driver()


class Host:
    """Host memory."""

    place = "cpu"

    def __init__(self, size):
        self.bytes = ctypes.create_string_buffer(size + 64)
        start = ctypes.addressof(self.bytes)
        self.address = start + -start % 64

    def write(self, offset, data):
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset, size):
        return ctypes.string_at(self.address + offset, size)


class Device:
    """Memory of device 0; never freed, the process is short."""

    place = "cuda"

    def __init__(self, size):
        self.address = driver().allocate(size)

    def write(self, offset, data):
        driver().write(self.address + offset, data)

    def read(self, offset, size):
        return driver().read(self.address + offset, size)


class Dtype:
    """Prints as torch's."""

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"torch.{self.name}"


DTYPES = {name: Dtype(name) for name in BYTES}


def dense(shape):
    strides = []
    for size in reversed(shape):
        strides.insert(0, math.prod(shape[len(shape) - len(strides) :]))
    return tuple(strides)


class Tensor:
    """As much of a torch tensor as ``PreparedKda`` uses."""

    def __init__(self, memory, shape, dtype, strides=None, offset=0, index=0):
        self.memory, self.shape, self.name, self.offset = memory, tuple(shape), dtype, offset
        self.dtype = DTYPES[dtype]
        self.strides = dense(self.shape) if strides is None else tuple(strides)
        self.device = types.SimpleNamespace(
            type=memory.place, index=index if memory.place == "cuda" else None
        )

    @classmethod
    def of(cls, memory, shape, dtype, data=None):
        """A dense tensor of these raw bytes, or zeros."""
        size = math.prod(shape) * BYTES[dtype]
        data = bytes(size) if data is None else bytes(data)
        assert len(data) == size, (len(data), size)
        made = cls(memory(size), shape, dtype)
        made.memory.write(0, data)
        return made

    def data_ptr(self):
        return self.memory.address + self.offset * BYTES[self.name]

    def stride(self):
        return self.strides

    def numel(self):
        return math.prod(self.shape)

    def raw(self):
        """Bytes of a dense tensor."""
        assert self.strides == dense(self.shape)
        width = BYTES[self.name]
        return self.memory.read(self.offset * width, self.numel() * width)

    def tolist(self):
        """Elements in order; bfloat16 as 16-bit integers."""
        indices = [self.offset]
        for size, stride in zip(self.shape, self.strides):
            indices = [at + i * stride for at in indices for i in range(size)]
        width = BYTES[self.name]
        reach = max(indices, default=-1) + 1
        whole = array.array(CODES[self.name], self.memory.read(0, reach * width))
        return [whole[at] for at in indices]

    def put(self, values):
        """Overwrites a dense tensor with raw elements."""
        data = array.array(CODES[self.name], values).tobytes()
        self.memory.write(self.offset * BYTES[self.name], data)

    def detach(self):
        return self

    def float(self):
        if self.name == "float32":
            return self
        assert self.name == "bfloat16"
        return self.made("float32", map(widen, self.tolist()))

    def made(self, dtype, values):
        data = array.array(CODES[dtype], values).tobytes()
        return Tensor.of(type(self.memory), self.shape, dtype, data)

    def view(self, *shape):
        assert self.strides == dense(self.shape)
        known = -math.prod(shape)
        shape = [self.numel() // known if size == -1 else size for size in shape]
        return Tensor(self.memory, shape, self.name, offset=self.offset)

    def transpose(self, a, b):
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        return Tensor(self.memory, shape, self.name, strides, self.offset)

    def contiguous(self):
        if self.strides == dense(self.shape):
            return self
        return self.made(self.name, self.tolist())

    def copy_(self, other):
        self.put(other.tolist())


class Interface:
    """A tensor shown through an array interface only."""

    def __init__(self, tensor, cuda=False, read_only=False):
        self.tensor = tensor
        width = BYTES[tensor.name]
        kinds = {"float32": "<f4", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8"}
        described = dict(
            shape=tensor.shape,
            typestr=kinds[tensor.name],
            data=(tensor.data_ptr(), read_only),
            strides=tuple(stride * width for stride in tensor.strides),
            version=3,
        )
        name = "__cuda_array_interface__" if cuda else "__array_interface__"
        setattr(self, name, described)


def widen(bits):
    """bfloat16 bits as a float."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16_ulp(x):
    """Spacing of bf16 numbers around x."""
    return 2.0 ** max((math.frexp(x)[1] if x else -1000) - 8, -133)


class Fixture:
    """One golden vector as raw tensors; ``metadata`` holds numbers and texts."""

    def __init__(self, path):
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        self.name = path.stem
        metadata = {k: v.strip('"') for k, v in header.pop("__metadata__").items()}
        self.heads, self.requests, self.tokens, self.pitch = (
            int(metadata[k]) for k in ("heads", "requests", "tokens", "pitch")
        )
        self.eps = float(metadata["eps"])
        self.lower_bound = (
            float(metadata["lower_bound"]) if metadata["gate"] == "lower_bound" else None
        )
        self.tensors = {}
        names = {"F32": "float32", "BF16": "bfloat16", "I32": "int32"}
        for name, entry in header.items():
            first, last = (8 + size + at for at in entry["data_offsets"])
            self.tensors[name] = (entry["shape"], names[entry["dtype"]], data[first:last])

    def tensor(self, name, memory):
        shape, dtype, data = self.tensors[name]
        return Tensor.of(memory, shape, dtype, data)

    def numbers(self, name):
        _, dtype, data = self.tensors[name]
        return array.array(CODES[dtype], data)

    def config(self, **changes):
        base = dict(
            heads=self.heads,
            conv_bias="conv_bias" in self.tensors,
            conv_layout="dim-first",
            lower_bound=self.lower_bound,
            gate_input="low-rank",
            null_rule="non-positive",
            state_dtype="f32",
            rollback="checkpoints",
            ragged=False,
            early_reads="weights",
            scale=128**-0.5,
            eps=self.eps,
        )
        return prepared_kda.Config(**{**base, **changes})

    @property
    def verify(self):
        return self.tokens > 1

    @property
    def policy(self):
        return prepared_kda.Policy(self.tokens if self.verify else 0, self.requests)

    def attention(self, memory):
        """The layer that the original reads."""
        bias = self.tensor("conv_bias", memory) if "conv_bias" in self.tensors else None
        layer = types.SimpleNamespace
        return layer(
            conv1d=layer(weight=self.tensor("conv_weight", memory), bias=bias),
            dt_bias=self.tensor("dt_bias", memory),
            A_log=self.tensor("a_log", memory),
            f_b_proj=layer(weight=self.tensor("f_b", memory)),
            o_norm=layer(weight=self.tensor("norm", memory), eps=self.eps),
            gate_lower_bound=self.lower_bound,
        )

    def weights(self, memory):
        attention = self.attention(memory)
        return prepared_kda.Weights(
            conv=prepared_kda.decode_conv_weight(attention.conv1d.weight),
            conv_bias=attention.conv1d.bias,
            f_b=attention.f_b_proj.weight,
            a_log=attention.A_log,
            dt_bias=attention.dt_bias,
            norm=attention.o_norm.weight,
        )

    def operands(self, memory):
        """Everything but the weights, by name."""
        rows, dim = self.requests * self.tokens, 128 * self.heads
        given = dict(
            projected=self.tensor("projected", memory),
            out=Tensor.of(memory, (rows, dim), "bfloat16", b"\xff" * (2 * rows * dim)),
            conv_cache=self.tensor("conv_in", memory),
            state=self.tensor("state_in", memory),
            slots=self.tensor("slots", memory),
        )
        if self.verify:
            given["accepted"] = self.tensor("accepted", memory)
        else:
            # A decode step's table is often one column of a wider one; here all of it.
            given["slots"] = given["slots"].view(self.requests)
        return given

    def compare(self, out, conv, state):
        """Asserts what a launch left: raw bf16 of ``out`` and of the dim-first conv cache, and the
        state's floats. Bounds as in the project's own golden-vector test: ``out`` within one bf16
        ulp and 2**-16 of its row's largest, each state matrix within twice 5e-7 a token."""
        dim = 128 * self.heads
        wanted = self.numbers("out")
        for row in range(self.requests * self.tokens):
            expected = wanted[row * dim : (row + 1) * dim]
            slack = max(map(abs, expected)) / 65536
            for column, x in enumerate(expected):
                found = widen(out[row * dim + column])
                if not abs(found - x) <= bf16_ulp(x) + slack:
                    raise AssertionError(f"out row {row} column {column}: {found}, expected {x}")
        if list(conv) != list(self.numbers("conv_out")):
            raise AssertionError("conv cache differs")
        wanted = self.numbers("state_out")
        for start in range(0, len(wanted), 128 * 128):
            expected = wanted[start : start + 128 * 128]
            found = state[start : start + 128 * 128]
            size = math.sqrt(sum(x * x for x in expected))
            error = math.sqrt(sum((x - y) ** 2 for x, y in zip(expected, found)))
            if not error <= 1e-6 * self.tokens * size:
                raise AssertionError(f"state matrix {start // 128**2}: error {error} of {size}")


def fixtures():
    paths = sorted(FIXTURES.glob("*.safetensors"))
    assert paths, FIXTURES
    return [Fixture(path) for path in paths]


COMPILE = """
import pickle, sys
import prepared_kda
arch, config, policies = pickle.load(sys.stdin.buffer)
plan = prepared_kda.Plan(arch, config, policies)
sys.stdout.buffer.write(plan.bundle(ptx=True, reset=not policies))
"""


@functools.lru_cache(maxsize=None)
def ptx(arch, config, policies):
    """A bundle of PTX, which is what the emulated driver runs. Made in a process of its own, for a
    libnvrtc that torch brought may write newer PTX than that driver takes."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    made = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=pickle.dumps((arch, config, list(policies))),
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    return made.stdout


def sources(config, policies, arch="sm_90a"):
    """Keyword arguments that make kernels for the driver at hand; without policies, the reset's."""
    if driver().emulated:
        bundle = ptx(arch, config, tuple(policies))
        return dict(bundle=bundle, cache_folder="off", compile=False)
    return dict(cache_folder="off")


def documented():
    """The Python examples of the embedding page."""
    page = (ROOT / "docs" / "embedding.md").read_text()
    found = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    assert len(found) >= 2, found
    return found
