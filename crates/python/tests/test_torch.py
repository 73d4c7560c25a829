"""The drop-in class with torch: on a GPU with its own tensors, streams and graphs; on the emulated
driver with CPU tensors over its memory. Skips without torch."""

import ctypes
import types
import unittest

from support import Device, Fixture, FIXTURES, documented, driver, fixtures, sources

try:
    import torch
except ImportError:
    torch = None

import prepared_kda
from prepared_kda import PreparedKda


def setUpModule():
    if torch is None:
        raise unittest.SkipTest("torch is not installed")
    if driver() is None:
        raise unittest.SkipTest("no CUDA driver")
    if not driver().emulated and not torch.cuda.is_available():
        raise unittest.SkipTest("torch has no CUDA")


def dtype(name):
    return getattr(torch, name)


def tensor(fixture, name):
    """The vector's tensor in memory that the driver's device reads."""
    shape, kind, data = fixture.tensors[name]
    return place(torch.frombuffer(bytearray(data), dtype=dtype(kind)).reshape(shape))


def place(value):
    if not driver().emulated:
        return value.cuda()
    memory = Device(value.numel() * value.element_size())
    raw = (ctypes.c_char * (value.numel() * value.element_size())).from_address(memory.address)
    made = torch.frombuffer(raw, dtype=value.dtype).reshape(value.shape)
    made.copy_(value)
    return made


class Placed:
    """Moves what the class derives from the weights to device memory: a CPU tensor that torch
    allocates is not the emulated device's."""

    def _derived(self):
        derived = super()._derived()
        if not driver().emulated:
            return derived
        return {name: value if value is None else place(value) for name, value in derived.items()}


def attention(fixture):
    """As a module, so that weights are parameters."""
    layer = types.SimpleNamespace
    bias = "conv_bias" in fixture.tensors

    def parameter(name):
        return torch.nn.Parameter(tensor(fixture, name), requires_grad=False)

    return layer(
        conv1d=layer(
            weight=parameter("conv_weight"), bias=parameter("conv_bias") if bias else None
        ),
        dt_bias=parameter("dt_bias"),
        A_log=torch.nn.Parameter(tensor(fixture, "a_log").view(1, 1, -1, 1), requires_grad=False),
        f_b_proj=layer(weight=parameter("f_b")),
        o_norm=layer(weight=parameter("norm"), eps=fixture.eps),
        gate_lower_bound=fixture.lower_bound,
    )


def prepare(fixture):
    class Layer(Placed, PreparedKda):
        pass

    key = (fixture.requests, fixture.tokens) if fixture.verify else fixture.requests
    given = operands(fixture)
    made = Layer(
        attention(fixture),
        {key: (fixture.pitch, 1)},
        True,
        host_memory=driver().emulated,
        **sources(fixture.config(), [fixture.policy]),
    )
    return made.prepare_caches(given["caches"]), given


def operands(fixture):
    rows, dim = fixture.requests * fixture.tokens, 128 * fixture.heads
    out = place(torch.full((rows, dim), float("nan"), dtype=torch.bfloat16))
    slots = tensor(fixture, "slots")
    # A wider block table's first columns.
    table = place(torch.full((fixture.requests, fixture.tokens + 3), 3, dtype=torch.int32))
    table[:, : fixture.tokens] = slots
    slots = table[:, : fixture.tokens]
    return dict(
        projected=tensor(fixture, "projected"),
        out=out,
        caches=(tensor(fixture, "conv_in"), tensor(fixture, "state_in")),
        slots=slots if fixture.verify else slots[:, 0],
        accepted=tensor(fixture, "accepted") if fixture.verify else None,
    )


def compare(fixture, given):
    conv, state = given["caches"]
    bits = [
        value.cpu().view(torch.int16).to(torch.int32).bitwise_and(0xFFFF).flatten().tolist()
        for value in (given["out"], conv)
    ]
    fixture.compare(*bits, state.cpu().flatten().tolist())


class DropIn(unittest.TestCase):
    def test_every_vector_eager(self):
        for fixture in fixtures():
            with self.subTest(fixture.name):
                kda, given = prepare(fixture)
                self.assertIs(kda.run(**given), given["out"])
                compare(fixture, given)

    def test_conv_weights_of_other_dtypes_are_widened(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        weight = tensor(fixture, "conv_weight")
        for kind in (torch.bfloat16, torch.float16):
            found = prepared_kda.decode_conv_weight(weight.to(kind))
            self.assertEqual(found.dtype, torch.float32)
            self.assertEqual(found.shape, (3, 4, 128))
            self.assertTrue(found.is_contiguous())
            expected = weight.to(kind).float().reshape(3, 128, 4).transpose(1, 2)
            self.assertTrue(torch.equal(found, expected))

    def test_tensors_of_other_dtypes_and_devices_are_refused(self):
        fixture = Fixture(FIXTURES / "decode_h2_b2_bias.safetensors")
        kda, given = prepare(fixture)
        with self.assertRaisesRegex(ValueError, "slots has dtype int64, expected int32"):
            kda.run(**{**given, "slots": given["slots"].long()})
        with self.assertRaisesRegex(ValueError, "out is on meta, expected cuda"):
            kda.run(**{**given, "out": given["out"].to("meta")})
        strict = PreparedKda(attention(fixture), {2: (fixture.pitch, 1)}, True)
        if driver().emulated:
            with self.assertRaisesRegex(ValueError, "the weights are on cpu, expected cuda"):
                strict.prepare_caches(given["caches"])

    def test_refreshed_weights(self):
        fixture = Fixture(FIXTURES / "decode_h3_b2_null.safetensors")
        kda, given = prepare(fixture)
        layer = kda._attention
        right = layer.conv1d.weight.clone()
        with torch.no_grad():
            layer.conv1d.weight.fill_(0.5)
        kda.refresh_weights()
        self.assertTrue(bool((kda.weights["conv"] == 0.5).all()))
        with torch.no_grad():
            layer.conv1d.weight.copy_(right)
        kda.refresh_weights()
        kda.run(**given)
        compare(fixture, given)


class CustomOp(unittest.TestCase):
    def stand_in(self):
        """A layer whose step is made of torch's own ops, on torch's own memory, which a step on the
        emulated device cannot reach: functionalisation copies operands there."""

        class StandIn(PreparedKda):
            def _launch(self, projected, out, conv, state, slots, accepted):
                out.copy_(projected[:, : out.shape[1]])
                conv.add_(1)
                state.mul_(2)

        fixture = Fixture(FIXTURES / "verify_h1_b3_t2_null.safetensors")
        layer = StandIn(attention(fixture), {(3, 2): (fixture.pitch, 1)}, True)
        given = operands(fixture)
        conv, state = given["caches"]
        values = (given["projected"], given["out"], conv, state, given["slots"], given["accepted"])
        return layer, [value.clone() for value in values]

    def test_the_op_is_sound(self):
        layer, values = self.stand_in()
        torch.library.opcheck(torch.ops.prepared_kda.step.default, (layer._handle, *values))
        schema = torch.ops.prepared_kda.step.default._schema
        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        self.assertEqual(written, {"out", "conv_cache", "state"})

    def test_writes_are_seen_through_functionalisation(self):
        layer, values = self.stand_in()
        projected, out, conv, state, slots, accepted = values
        first_conv, first_state = conv.clone(), state.clone()

        def step(projected, out, conv, state, slots, accepted):
            state = state[:]  # a view is an alias
            for _ in range(2):
                layer.run(projected, out, caches=(conv, state), slots=slots, accepted=accepted)
            return out.float().sum()

        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        total = compiled(*values)
        self.assertTrue(torch.equal(conv, first_conv + 1 + 1))
        self.assertTrue(torch.equal(state, first_state * 4))
        self.assertTrue(torch.equal(out, projected[:, : out.shape[1]]))
        self.assertTrue(torch.equal(total, out.float().sum()))

    def test_the_fake_touches_nothing(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        kda, given = prepare(fixture)
        with FakeTensorMode() as mode:
            fakes = [
                mode.from_tensor(value)
                for value in (given["projected"], given["out"], *given["caches"], given["slots"])
            ]
            self.assertIsNone(torch.ops.prepared_kda.step(kda._handle, *fakes, None))

    def test_a_layer_that_is_gone_is_an_error(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        kda, given = prepare(fixture)
        conv, state = given["caches"]
        with self.assertRaisesRegex(RuntimeError, "layer 999999 is no longer alive"):
            torch.ops.prepared_kda.step(
                999999, given["projected"], given["out"], conv, state, given["slots"], None
            )

    def compiled(self, backend):
        for name in ("decode_h2_b2_bias", "verify_h1_b2_t4"):
            fixture = Fixture(FIXTURES / f"{name}.safetensors")
            kda, given = prepare(fixture)
            seen = []

            def watch(graph, inputs):
                seen.extend(str(node.target) for node in graph.graph.nodes)
                if backend == "eager":
                    return graph.forward
                from torch._dynamo.backends.registry import lookup_backend

                return lookup_backend(backend)(graph, inputs)

            def step(projected, out, conv, state, slots, accepted):
                kda.run(projected, out, caches=(conv, state), slots=slots, accepted=accepted)
                return out.float() * 2.0

            torch._dynamo.reset()
            compiled = torch.compile(step, fullgraph=True, backend=watch)
            conv, state = given["caches"]
            doubled = compiled(
                given["projected"], given["out"], conv, state, given["slots"], given["accepted"]
            )
            self.assertTrue(any("prepared_kda.step" in target for target in seen), seen)
            compare(fixture, given)
            self.assertTrue(torch.equal(doubled, given["out"].float() * 2.0))

    def test_compiled_in_one_graph(self):
        self.compiled("eager")

    def test_compiled_ahead_of_time_functionalised(self):
        if driver().emulated:
            self.skipTest("functionalisation copies operands to memory that is not the device's")
        self.compiled("aot_eager")

    def test_compiled_by_inductor(self):
        self.compiled("inductor")


class Graphs(unittest.TestCase):
    def setUp(self):
        if driver().emulated:
            self.skipTest("torch's graphs need a GPU")

    def test_every_vector_in_a_graph(self):
        for fixture in fixtures():
            with self.subTest(fixture.name):
                kda, given = prepare(fixture)
                before = [value.clone() for value in given["caches"]]
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    kda.run(**given)
                for _ in range(3):
                    for value, first in zip(given["caches"], before):
                        value.copy_(first)
                    given["out"].fill_(float("nan"))
                    graph.replay()
                    torch.cuda.synchronize()
                    compare(fixture, given)

    def test_the_documented_example_runs(self):
        (text,) = [text for text in documented() if "CUDAGraph" in text]
        names = {}
        exec(text, names)
        torch.cuda.synchronize()
        self.assertIsNone(names["faults"])

    def test_the_current_stream_is_used(self):
        fixture = Fixture(FIXTURES / "decode_h2_b2_bias.safetensors")
        kda, given = prepare(fixture)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            # The step must come after this on the same stream.
            torch.cuda._sleep(50_000_000)
            kda.run(**given)
            event.record()
        self.assertFalse(event.query())
        self.assertTrue(bool(torch.isnan(given["out"]).all()))
        event.synchronize()
        compare(fixture, given)


if __name__ == "__main__":
    unittest.main()
