"""Steps on the CUDA driver at hand, a GPU's or the emulated one, against the golden vectors."""

import ctypes
import gc
import math
import threading
import time
import types
import unittest

import prepared_kda
from prepared_kda import Kda, Policy, PreparedKda, Reset
from support import Device, Fixture, FIXTURES, Host, Interface, Tensor, driver, fixtures, sources

try:
    import numpy
except ImportError:
    numpy = None


def setUpModule():
    if driver() is None:
        raise unittest.SkipTest("no CUDA driver")


def array_over(tensor):
    """A NumPy array over the tensor's memory, bfloat16 as 16-bit integers."""
    kinds = {"float32": numpy.float32, "bfloat16": numpy.uint16, "int32": numpy.int32}
    size = tensor.numel() * numpy.dtype(kinds[tensor.name]).itemsize
    raw = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return numpy.frombuffer(raw, kinds[tensor.name]).reshape(tensor.shape)


def make(fixture, *more, **changes):
    config = fixture.config(**changes)
    policies = [fixture.policy, *more]
    return Kda(config, policies, device=0, **sources(config, policies))


class Golden(unittest.TestCase):
    def check(self, fixture, given):
        driver().call("cuCtxSynchronize")
        conv, state = given["conv_cache"], given["state"]
        fixture.compare(given["out"].tolist(), conv.tolist(), state.tolist())

    def test_every_vector_by_name(self):
        stream = driver().stream()
        for fixture in fixtures():
            with self.subTest(fixture.name):
                kda = make(fixture)
                given = fixture.operands(Device)
                self.assertIsNone(kda.run(fixture.weights(Device), stream=stream, **given))
                self.assertIsNone(kda.take_faults(stream))
                self.check(fixture, given)

    def test_a_projected_gate_agrees_where_the_product_is_exact(self):
        fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        attention = fixture.attention(Device)
        # F_B picks an element of F_A for each gate, so the product is one.
        picks = [(7 * i + 3) % 128 for i in range(128)]
        one = [0x3F80 if picks[i] == j else 0 for i in range(128) for j in range(128)]
        f_b = attention.f_b_proj.weight
        f_b.put(one)
        given = dict(
            conv=prepared_kda.decode_conv_weight(attention.conv1d.weight),
            a_log=attention.A_log,
            dt_bias=attention.dt_bias,
            norm=attention.o_norm.weight,
        )
        left = []
        for gate_input in ("low-rank", "projected"):
            kda = make(fixture, gate_input=gate_input)
            operands = fixture.operands(Device)
            if gate_input == "low-rank":
                weights = prepared_kda.Weights(**given, f_b=f_b)
            else:
                weights = prepared_kda.Weights(**given)
                packed = operands["projected"].tolist()
                gate = Tensor.of(Device, (8, 131), "bfloat16", b"\xff" * (8 * 131 * 2))
                rows = [[packed[fixture.pitch * row + 512 + pick] for pick in picks] for row in range(8)]
                gate.put([x for row in rows for x in [0x7FC0, *row, 0x7FC0, 0x7FC0]])
                operands["gate_input"] = Tensor(gate.memory, (8, 128), "bfloat16", (131, 1), offset=1)
            kda.run(weights, stream=0, **operands)
            driver().call("cuCtxSynchronize")
            left.append([operands[name].tolist() for name in ("out", "conv_cache", "state")])
            self.assertEqual("projected" in kda.kernels[0].entry, gate_input == "projected")
        self.assertEqual(left[0], left[1])
        self.assertFalse(any(math.isnan(x) for x in left[0][2]))

    def test_records_and_token_counts_change_no_bit(self):
        fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        left = []
        for records in (False, True):
            rollback = "records" if records else "checkpoints"
            kda = make(fixture, rollback=rollback, ragged=records)
            given = fixture.operands(Device)
            given["accepted"].put([1, 1])
            slots = given["state"].shape[0]
            if records:
                pool = Tensor.of(Device, (slots, 3, 1, 3, 128), "float32", b"\xff" * (slots * 3 * 1536))
                counts = Tensor.of(Device, (2,), "int32")
                counts.put([4, 2])
                given.update(records=pool, token_counts=counts, tokens=4)
            kda.run(fixture.weights(Device), stream=0, **given)
            driver().call("cuCtxSynchronize")
            first = [row[0] for row in zip(*[iter(given["slots"].tolist())] * 4)]
            state = given["state"].tolist()
            matrices = [state[slot * 16384 : (slot + 1) * 16384] for slot in first]
            left.append((given["out"].tolist(), matrices, given["conv_cache"].tolist()))
        (out, states, conv), (ragged, after_first, ragged_conv) = left
        # Both requests' first tokens' states, the rows of four and of two tokens.
        self.assertEqual(states, after_first)
        self.assertEqual(out[: 6 * 128], ragged[: 6 * 128])
        self.assertEqual(ragged[6 * 128 :], [0xFFFF] * 256)
        self.assertNotEqual(out[6 * 128 :], ragged[6 * 128 :])
        self.assertNotEqual(conv, ragged_conv)
        written = pool.tolist()
        unwritten = [math.isnan(x) for x in written]
        self.assertEqual(unwritten.count(False), (3 + 1) * 384)

    def test_a_wrong_vector_is_noticed(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        kda = make(fixture)
        given = fixture.operands(Device)
        kda.run(fixture.weights(Device), stream=0, **given)
        state = given["state"].tolist()
        conv = given["conv_cache"].tolist()
        out = given["out"].tolist()
        fixture.compare(out, conv, state)
        for wrong in (
            ([out[0] ^ 0x8000] + out[1:], conv, state),
            (out, conv[:-1] + [conv[-1] ^ 1], state),
            (out, conv, [x * 1.00001 for x in state]),
            ([0x7FC0] + out[1:], conv, state),
        ):
            with self.assertRaises(AssertionError):
                fixture.compare(*wrong)

    def test_token_first_caches_wide_tables_and_parts(self):
        fixture = Fixture(FIXTURES / "verify_h1_b3_t2_null.safetensors")
        kda = make(fixture, conv_layout="token-first")
        given = fixture.operands(Device)
        slots, channels, length = given["conv_cache"].shape
        given["conv_cache"] = given["conv_cache"].transpose(1, 2).contiguous()
        # Columns 3 and 4 of a block table of 11 columns.
        table = Tensor.of(Device, (3, 11), "int32")
        rows = given["slots"].tolist()
        table.put([7] * 3 + rows[0:2] + [7] * 9 + rows[2:4] + [7] * 9 + rows[4:6] + [7] * 6)
        given["slots"] = Tensor(table.memory, (3, 2), "int32", (11, 1), offset=3)
        # The projection's parts in buffers of their own, out in a wider one.
        packed = given.pop("projected")
        for name, first, width in [
            ("qkv", 0, 384),
            ("output_gate", 384, 128),
            ("f_a", 512, 128),
            ("beta", 640, 1),
        ]:
            part = Tensor(packed.memory, (6, width), "bfloat16", packed.strides, first)
            given[name] = part.contiguous()
        wide = Tensor.of(Device, (8, 130), "bfloat16", b"\x5a" * (8 * 130 * 2))
        given["out"] = Tensor(wide.memory, (8, 128), "bfloat16", (130, 1), offset=1)
        kda.run(fixture.weights(Device), stream=0, **given)
        out = given["out"].tolist()
        given["conv_cache"] = given["conv_cache"].transpose(1, 2).contiguous()
        driver().call("cuCtxSynchronize")
        fixture.compare(out[: 6 * 128], given["conv_cache"].tolist(), given["state"].tolist())
        # Rows past the batch and columns beside it keep their bytes.
        self.assertEqual(out[6 * 128 :], [0x5A5A] * 256)
        whole = wide.tolist()
        for row in range(8):
            self.assertEqual((whole[130 * row], whole[130 * row + 129]), (0x5A5A, 0x5A5A))

    def test_a_second_pool_as_source(self):
        fixture = Fixture(FIXTURES / "decode_h2_b2_bias.safetensors")
        kda = make(fixture)
        given = fixture.operands(Device)
        source = given["state"]
        before = source.raw()
        given["state"] = Tensor.of(Device, source.shape, "float32", before)
        source_first = source.tolist()
        # The live slots of the written pool hold something else before the step.
        state = source.tolist()
        for slot in given["slots"].tolist():
            first, last = (at * 2 * 128 * 128 for at in (slot, slot + 1))
            state[first:last] = [7.0] * (last - first)
        given["state"].put(state)
        given["state_source"] = source
        kda.run(fixture.weights(Device), stream=0, **given)
        self.check(fixture, given)
        self.assertEqual(source.tolist(), source_first)

    def test_device_memory_through_interfaces_and_stream_objects(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        kda = make(fixture)
        handle = driver().stream()
        for stream in (
            types.SimpleNamespace(cuda_stream=handle),
            types.SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
            handle,
        ):
            given = fixture.operands(Device)
            shown = {name: Interface(tensor, cuda=True) for name, tensor in given.items()}
            kda.run(fixture.weights(Device), stream=stream, **shown)
            self.check(fixture, given)
        with self.assertRaisesRegex(TypeError, "stream is a str, expected a handle"):
            kda.run(fixture.weights(Device), stream="0", **fixture.operands(Device))
        with self.assertRaises(TypeError):
            kda.run(fixture.weights(Device), **fixture.operands(Device))

    def test_host_arrays_where_the_device_reads_host_memory(self):
        if not driver().emulated:
            self.skipTest("the device may not read host memory")
        fixture = Fixture(FIXTURES / "verify_h1_b3_t2_null.safetensors")
        config, policies = fixture.config(), [fixture.policy]
        given = fixture.operands(Device)
        shown = {name: Interface(tensor) for name, tensor in given.items()}
        if numpy:
            shown = {name: array_over(tensor) for name, tensor in given.items()}
        weights = fixture.weights(Device)
        strict = Kda(config, policies, device=0, **sources(config, policies))
        with self.assertRaisesRegex(ValueError, "is in host memory"):
            strict.run(weights, stream=0, **shown)
        kda = Kda(config, policies, device=0, host_memory=True, **sources(config, policies))
        kda.run(weights, stream=0, **shown)
        self.check(fixture, given)

    def test_other_threads_run_while_a_step_is_launched(self):
        if not driver().emulated:
            self.skipTest("a launch returns at once")
        fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        kda, weights = make(fixture), fixture.weights(Device)
        givens = [fixture.operands(Device) for _ in range(4)]
        ticks, stop = [], threading.Event()

        def tick():
            while not stop.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        longest = (0, 0)
        for given in givens:
            started = time.monotonic()
            kda.run(weights, stream=0, **given)
            ended = time.monotonic()
            longest = max(longest, (ended - started, started))
        stop.set()
        thread.join()
        lasted, started = longest
        # A third of the step, far from both ends: a thread that must wait for it has no tick there.
        inside = [t for t in ticks if started + lasted / 3 < t < started + 2 * lasted / 3]
        self.assertGreater(lasted, 0.01)
        self.assertGreater(len(inside), 0)

    def test_weights_are_read_where_they_are(self):
        fixture = Fixture(FIXTURES / "decode_h3_b2_null.safetensors")
        kda = make(fixture)
        moved = fixture.attention(Device)
        norm = fixture.tensor("norm", Device)
        # Its storage is another one at the launch.
        wrong = Tensor.of(Device, (128,), "float32")
        right_memory, norm.memory = norm.memory, wrong.memory
        weights = prepared_kda.Weights(
            conv=prepared_kda.decode_conv_weight(moved.conv1d.weight),
            f_b=moved.f_b_proj.weight,
            a_log=moved.A_log,
            dt_bias=moved.dt_bias,
            norm=norm,
        )
        norm.memory = right_memory
        del moved
        gc.collect()
        given = fixture.operands(Device)
        kda.run(weights, stream=0, **given)
        self.check(fixture, given)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        self.kda = make(self.fixture)
        self.weights = self.fixture.weights(Device)

    def run_one(self, **changes):
        given = self.fixture.operands(Device)
        before = given["out"].tolist()
        given.update(changes)
        try:
            self.kda.run(self.weights, stream=0, **given)
        finally:
            after = given["out"].tolist() if isinstance(given["out"], Tensor) else None
        return before, after

    def test_host_memory_is_refused(self):
        for name, tensor in self.fixture.operands(Host).items():
            with self.subTest(name), self.assertRaisesRegex(
                ValueError, f"{name} is in host memory, expected memory of the device"
            ):
                self.run_one(**{name: tensor})
        with self.assertRaisesRegex(ValueError, "conv is in host memory"):
            self.kda.run(
                self.fixture.weights(Host), stream=0, **self.fixture.operands(Device)
            )
        pools = self.fixture.operands(Host)
        with self.assertRaisesRegex(ValueError, "state is in host memory"):
            self.kda.check_caches(conv_cache=pools["conv_cache"], state=pools["state"])

    def test_another_device_is_refused(self):
        out = self.fixture.operands(Device)["out"]
        out.device.index = 1
        with self.assertRaisesRegex(ValueError, "out is on cuda:1, expected cuda:0"):
            self.run_one(out=out)

    def test_an_unprepared_size_is_an_error_and_launches_nothing(self):
        short = self.fixture.operands(Device)
        short["accepted"] = None
        out = short["out"]
        before = out.tolist()
        with self.assertRaisesRegex(ValueError, "no decode kernel is prepared"):
            self.run_one(accepted=None, out=out, slots=Tensor.of(Device, (8,), "int32"))
        self.assertEqual(out.tolist(), before)

    def test_device_faults_are_counted_and_taken(self):
        self.assertIsNone(self.kda.take_faults(0))
        slots = self.fixture.operands(Device)["slots"]
        rows = slots.tolist()
        rows[5] = 10  # the pools have 10 slots
        slots.put(rows)
        _, after = self.run_one(slots=slots)
        self.assertEqual(after[4 * 128 :], [0] * (4 * 128))
        peeked = self.kda.peek_faults()
        self.assertEqual((peeked.count, peeked.request, peeked.kind), (1, 1, "slot-out-of-range"))
        taken = self.kda.take_faults(0)
        self.assertEqual(repr(taken), "Faults(count=1, request=1, kind='slot-out-of-range')")
        self.assertIsNone(self.kda.peek_faults())

        accepted = self.fixture.operands(Device)["accepted"]
        accepted.put([5, 0])
        self.run_one(accepted=accepted)
        taken = self.kda.peek_faults()
        self.assertEqual((taken.count, taken.request, taken.kind), (2, 0, "accepted-out-of-range"))
        self.kda.reset_faults()
        self.assertIsNone(self.kda.take_faults(0))

    def test_what_is_prepared_is_listed(self):
        (kernel,) = self.kda.kernels
        self.assertEqual(self.kda.policies, [(4, 2, 0)])
        self.assertEqual(self.kda.device, 0)
        self.assertEqual(kernel.arch, self.kda.arch)
        self.assertEqual(kernel.verify_tokens, 4)
        self.assertIn("verify", kernel.entry)
        self.assertIn("1 heads on cuda:0", repr(self.kda))


class Resets(unittest.TestCase):
    def test_named_slots_are_zeroed_and_others_kept(self):
        fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        for layout in ("dim-first", "token-first"):
            config = fixture.config(conv_layout=layout)
            reset = Reset(config, device=0, **sources(config, []))
            given = fixture.operands(Device)
            conv, state = given["conv_cache"], given["state"]
            if layout == "token-first":
                conv = conv.transpose(1, 2).contiguous()
            lines, matrices = conv.tolist(), state.tolist()
            # Two columns of a wider table; 0 and -1 are null, 10 is no slot.
            table = Tensor.of(Device, (3, 5), "int32")
            table.put([7, 2, 5, 7, 7, 7, 0, 9, 7, 7, 7, 10, -1, 7, 7])
            slots = Tensor(table.memory, (3, 2), "int32", (5, 1), offset=1)
            reset.run(stream=0, slots=slots, conv_cache=conv, state=state)
            for slot in (2, 5, 9):
                lines[slot * 2304 : (slot + 1) * 2304] = [0] * 2304
                matrices[slot * 16384 : (slot + 1) * 16384] = [0.0] * 16384
            self.assertEqual(conv.tolist(), lines)
            self.assertEqual(state.tolist(), matrices)
            one = Tensor.of(Device, (1,), "int32")
            one.put([1])
            reset.run(stream=0, slots=one, conv_cache=conv, state=state)
            matrices[16384 : 2 * 16384] = [0.0] * 16384
            self.assertEqual(state.tolist(), matrices)

    def test_bad_operands_are_refused(self):
        fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        config = fixture.config()
        reset = Reset(config, device=0, **sources(config, []))
        given = fixture.operands(Device)
        good = {name: given[name] for name in ("slots", "conv_cache", "state")}
        host = fixture.operands(Host)
        for name in good:
            with self.assertRaisesRegex(ValueError, f"{name} is in host memory"):
                reset.run(stream=0, **{**good, name: host[name]})
        with self.assertRaisesRegex(ValueError, "slots has dtype float32, expected int32"):
            reset.run(stream=0, **{**good, "slots": given["state"]})
        with self.assertRaisesRegex(TypeError, "stream"):
            reset.run(**good)
        with self.assertRaisesRegex(ValueError, "heads is 0"):
            Reset(fixture.config(heads=0), device=0, **sources(config, []))


class Capture(unittest.TestCase):
    def begin(self, stream):
        driver().call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        # A capture left open by a failure would fail every later test.
        unused = ctypes.c_void_p()
        self.addCleanup(
            driver().code, "cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(unused)
        )

    def end(self, stream):
        graph = ctypes.c_void_p()
        driver().call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        nodes = ctypes.c_size_t()
        driver().call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
        executable = ctypes.c_void_p()
        driver().call(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0)
        )
        return executable, nodes.value

    def test_a_captured_step_replays_with_other_slots(self):
        fixture = Fixture(FIXTURES / "decode_h2_b2_bias.safetensors")
        kda = make(fixture)
        stream = driver().stream()
        weights, given = fixture.weights(Device), fixture.operands(Device)
        right = given["slots"].tolist()
        given["slots"].put([-1, -1])
        before = given["state"].tolist()
        self.begin(stream)
        with self.assertRaisesRegex(RuntimeError, "being captured: prepare before"):
            Kda(
                fixture.config(),
                [fixture.policy],
                device=0,
                stream=stream,
                **sources(fixture.config(), [fixture.policy]),
            )
        with self.assertRaisesRegex(RuntimeError, "being captured"):
            kda.take_faults(stream)
        with self.assertRaisesRegex(ValueError, "slots holds 1 elements, 2 needed"):
            short = Tensor(given["slots"].memory, (1,), "int32")
            kda.run(weights, stream=stream, **{**given, "slots": short})
        kda.run(weights, stream=stream, **given)
        executable, nodes = self.end(stream)
        self.assertEqual(nodes, 1)

        def replay():
            driver().call("cuGraphLaunch", executable, ctypes.c_void_p(stream))
            driver().call("cuStreamSynchronize", ctypes.c_void_p(stream))

        replay()
        self.assertEqual(given["out"].tolist(), [0] * 512)
        self.assertEqual(given["state"].tolist(), before)
        given["slots"].put(right)
        replay()
        conv, state = given["conv_cache"], given["state"]
        fixture.compare(given["out"].tolist(), conv.tolist(), state.tolist())


class DropIn(unittest.TestCase):
    def prepared(self, fixture, attention, policies=None, **keywords):
        key = (fixture.requests, fixture.tokens) if fixture.verify else fixture.requests
        kda = PreparedKda(
            attention,
            policies or {key: (fixture.pitch, 0)},
            keywords.pop("conv_dim_first", True),
            **{**sources(fixture.config(), [fixture.policy]), **keywords},
        )
        return kda

    def step(self, fixture, kda, given):
        caches = (given["conv_cache"], given["state"], None)
        out = kda.run(
            given["projected"],
            given["out"],
            caches=caches,
            slots=given["slots"],
            accepted=given.get("accepted"),
        )
        self.assertIs(out, given["out"])

    def test_every_vector(self):
        for fixture in fixtures():
            with self.subTest(fixture.name):
                kda = self.prepared(fixture, fixture.attention(Device))
                given = fixture.operands(Device)
                caches = (given["conv_cache"], given["state"])
                self.assertIs(kda.prepare_caches(caches), kda)
                self.step(fixture, kda, given)
                self.assertIsNone(kda.kda.take_faults(0))
                conv, state = caches
                fixture.compare(given["out"].tolist(), conv.tolist(), state.tolist())
                (kernel,) = kda.kernels.values()
                self.assertEqual(kernel.verify_tokens, fixture.policy.verify_tokens)

    def test_records_are_the_third_cache(self):
        fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        outs = []
        for rollback in ("checkpoints", "records"):
            made = sources(fixture.config(rollback=rollback), [fixture.policy])
            kda = self.prepared(fixture, fixture.attention(Device), rollback=rollback, **made)
            given = fixture.operands(Device)
            given["accepted"].put([1, 1])
            slots = given["state"].shape[0]
            pool = Tensor.of(Device, (slots, 3, 1, 3, 128), "float32", b"\xff" * (slots * 3 * 1536))
            caches = (given["conv_cache"], given["state"], pool)
            if rollback == "records":
                with self.assertRaisesRegex(ValueError, "caches has no record pool"):
                    kda.prepare_caches(caches[:2])
                narrow = Tensor.of(Device, (slots, 3, 1, 3, 128), "bfloat16")
                with self.assertRaisesRegex(ValueError, "records has dtype bfloat16"):
                    kda.prepare_caches((*caches[:2], narrow))
                # A slot a request.
                rows = given["slots"].tolist()[::4]
                given["slots"] = Tensor.of(Device, (len(rows),), "int32")
                given["slots"].put(rows)
            kda.prepare_caches(caches)
            named = {name: given[name] for name in ("slots", "accepted")}
            kda.run(given["projected"], given["out"], caches=caches, tokens=4, **named)
            driver().call("cuCtxSynchronize")
            outs.append(given["out"].tolist())
            self.assertEqual("records" in kda.kda.kernels[0].entry, rollback == "records")
            untouched = all(math.isnan(x) for x in pool.tolist())
            self.assertEqual(untouched, rollback == "checkpoints")
        self.assertEqual(outs[0], outs[1])

    def test_longer_slots_and_rows_past_the_batch(self):
        fixture = Fixture(FIXTURES / "decode_h2_b2_bias.safetensors")
        kda = self.prepared(fixture, fixture.attention(Device))
        given = fixture.operands(Device)
        rows = given["slots"].tolist()
        given["slots"] = Tensor.of(Device, (6,), "int32")
        given["slots"].put(rows + [3, 3, 99, 99])
        given["out"] = Tensor.of(Device, (5, 256), "bfloat16", b"\x5a" * (5 * 512))
        kda.prepare_caches((given["conv_cache"], given["state"]))
        self.step(fixture, kda, given)
        out = given["out"].tolist()
        fixture.compare(out[:512], given["conv_cache"].tolist(), given["state"].tolist())
        self.assertEqual(out[512:], [0x5A5A] * 768)

    def test_slots_whose_columns_are_apart_are_copied(self):
        fixture = Fixture(FIXTURES / "verify_h1_b3_t2_null.safetensors")
        kda = self.prepared(fixture, fixture.attention(Device))
        given = fixture.operands(Device)
        given["slots"] = given["slots"].transpose(0, 1).contiguous().transpose(0, 1)
        self.assertNotEqual(given["slots"].stride()[1], 1)
        kda.prepare_caches((given["conv_cache"], given["state"]))
        self.step(fixture, kda, given)
        conv, state = given["conv_cache"], given["state"]
        fixture.compare(given["out"].tolist(), conv.tolist(), state.tolist())

    def test_layers_of_equal_settings_share_one_object(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        given = fixture.operands(Device)
        caches = (given["conv_cache"], given["state"])
        layers = [
            self.prepared(fixture, fixture.attention(Device)).prepare_caches(caches)
            for _ in range(3)
        ]
        self.assertEqual(len({id(layer.kda) for layer in layers}), 1)
        attention = fixture.attention(Device)
        attention.o_norm.eps = 1e-6
        other = self.prepared(fixture, attention).prepare_caches(caches)
        self.assertIsNot(other.kda, layers[0].kda)

    def test_c43_refreshed_weights_are_used_at_the_same_addresses(self):
        fixture = Fixture(FIXTURES / "decode_h3_b2_null.safetensors")
        attention = fixture.attention(Device)
        conv = attention.conv1d.weight
        right = conv.tolist()
        conv.put([0.25] * len(right))
        kda = self.prepared(fixture, attention)
        given = fixture.operands(Device)
        kda.prepare_caches((given["conv_cache"], given["state"]))
        addresses = {name: tensor and tensor.data_ptr() for name, tensor in kda.weights.items()}
        conv.put(right)
        kda.refresh_weights()
        self.assertEqual(
            addresses, {name: tensor and tensor.data_ptr() for name, tensor in kda.weights.items()}
        )
        self.step(fixture, kda, given)
        fixture.compare(
            given["out"].tolist(), given["conv_cache"].tolist(), given["state"].tolist()
        )

    def test_wrong_pools_are_found_when_preparing(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        given = fixture.operands(Device)
        kda = self.prepared(fixture, fixture.attention(Device))
        turned = given["conv_cache"].transpose(1, 2).contiguous()
        with self.assertRaisesRegex(ValueError, "conv_cache has shape"):
            kda.prepare_caches((turned, given["state"]))
        with self.assertRaisesRegex(RuntimeError, "prepare_caches was not called"):
            self.step(fixture, kda, given)
        with self.assertRaisesRegex(ValueError, "state dtype"):
            kda.prepare_caches((given["conv_cache"], given["slots"]))

    def test_threads_run_steps_at_once(self):
        fixture = Fixture(FIXTURES / "decode_h1_b2_softplus.safetensors")
        kda = self.prepared(fixture, fixture.attention(Device))
        givens = [fixture.operands(Device) for _ in range(4)]
        kda.prepare_caches((givens[0]["conv_cache"], givens[0]["state"]))
        errors = []

        def work(given):
            try:
                self.step(fixture, kda, given)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(given,)) for given in givens]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        for given in givens:
            conv, state = given["conv_cache"], given["state"]
            fixture.compare(given["out"].tolist(), conv.tolist(), state.tolist())


if __name__ == "__main__":
    unittest.main()
