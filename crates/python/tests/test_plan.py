"""Settings, policies, kernels and operand checks: no device needed."""

import ctypes
import math
import dataclasses
import pathlib
import tempfile
import threading
import time
import unittest

import prepared_kda
from prepared_kda import Config, Plan, Policy
from support import Dtype, Fixture, FIXTURES, Host, Interface, Tensor, driver, fixtures

try:
    import numpy
except ImportError:
    numpy = None


class Settings(unittest.TestCase):
    def test_every_bad_setting_is_refused_by_name(self):
        good = Config.kimi_k3(2)
        for change, text in [
            (dict(heads=0), "heads is 0, allowed: 1..=128"),
            (dict(heads=129), "heads is 129, allowed: 1..=128"),
            (dict(conv_layout="sideways"), "conv layout"),
            (dict(null_rule="never"), "null rule"),
            (dict(state_dtype="f16"), "state dtype"),
            (dict(early_reads="all"), "early reads"),
            (dict(gate_input="given"), "`given` is no gate input, allowed: low-rank, projected"),
            (dict(lower_bound=1.0), "lower bound is 1, allowed: finite and below 0"),
            (dict(scale=math.inf), "scale is inf"),
            (dict(eps=0.0), "eps is 0"),
        ]:
            config = dataclasses.replace(good, **change)
            with self.subTest(change), self.assertRaisesRegex(ValueError, text):
                Plan("sm_90a", config, [Policy()])
        with self.assertRaisesRegex(ValueError, "sm_91"):
            Plan("sm_91", good, [Policy()])
        with self.assertRaisesRegex(ValueError, "tokens is 17, allowed: 1..=16"):
            Plan("sm_90a", good, [Policy(17, 8, "split1-256x8-block")])
        with self.assertRaisesRegex(ValueError, "mode"):
            Plan("sm_90a", good, [Policy(0, 8, "split3-fast")])
        projected = dataclasses.replace(good, gate_input="projected")
        with self.assertRaisesRegex(ValueError, "gate_schedule is cluster, allowed: block with a projected gate"):
            Plan("sm_90a", projected, [Policy(0, 8, "split4-128x8-cluster")])
        with self.assertRaisesRegex(ValueError, "max_requests is 65536, at most 65535"):
            Plan("sm_90a", good, [Policy(0, 65536)])

    def test_what_is_no_configuration_is_a_type_error(self):
        with self.assertRaises((TypeError, AttributeError)):
            Plan("sm_90a", object(), [Policy()])
        with self.assertRaises(TypeError):
            Plan("sm_90a", Config.kimi_k3(2), 7)

    def test_policies_are_the_measured_ones_the_named_ones_and_one_size_s(self):
        config = Config.kimi_k3(12)
        measured = Plan("sm_90a", config, [Policy()]).policies
        self.assertGreater(len(measured), 2)
        self.assertEqual(measured[-1][1], 65535)
        named = Plan("sm_90a", config, [Policy(4, None, "split1-256x8-block")])
        self.assertEqual(named.policies, [(4, 65535, 0)])
        both = Plan("sm_90a", config, [Policy(0, 1), Policy(0, 200)])
        self.assertEqual(both.policies, [(0, 1, 0), (0, 200, 1)])

    def test_a_policy_file_serves_policies_that_name_no_mode(self):
        form = (
            'device = "GPU"\narch = "%s"\ndate = "2026-12-02"\nentries = [\n'
            '    { heads = 12, kind = "decode", tokens = 1, early_reads = "weights", '
            'max_requests = 65535, mode = "%s", microseconds = 5.5 },\n]\n'
        )
        text = form % ("sm_90a", "split2-256x8-cluster")
        config = Config.kimi_k3(12)

        def modes(given, **changes):
            config_now = dataclasses.replace(config, **changes)
            policies = [Policy(), Policy(0, 3), Policy(4, 8, "split1-256x8-block")]
            plan = Plan("sm_90a", config_now, policies, policy_file=given)
            compiled = plan.kernels()
            return [(most, compiled[kernel].mode) for _, most, kernel in plan.policies]

        named = (8, "split1-256x8-block")
        file = [(3, "split2-256x8-cluster"), (65535, "split2-256x8-cluster"), named]
        self.assertEqual(modes(text.encode()), file)
        block = [(most, mode.replace("cluster", "block")) for most, mode in file]
        self.assertEqual(modes(text.encode(), gate_input="projected"), block)
        self.assertNotEqual(modes(None), file)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "policies.toml"
            path.write_text(text)
            self.assertEqual(modes(path), file)
            self.assertEqual(modes(str(path)), file)
        for given, error, said in [
            ("/nonexistent/policies.toml", OSError, "/nonexistent/policies.toml"),
            (b"\xff", ValueError, "policy_file is no UTF-8 after 0 bytes"),
            (b"device = 7", ValueError, "device is 7, allowed: a text"),
            ((form % ("sm_90a", "split3")).encode(), ValueError, "mode"),
            (
                (form % ("sm_80", "split1-256x8-block")).encode(),
                ValueError,
                "the policy file of GPU is for sm_80, kernels are for sm_90a",
            ),
            (7, TypeError, ""),
        ]:
            with self.subTest(given), self.assertRaisesRegex(error, said):
                Plan("sm_90a", config, [Policy()], policy_file=given)
            if driver():
                with self.subTest(given), self.assertRaisesRegex(error, said):
                    prepared_kda.Kda(config, [Policy()], device=0, policy_file=given)

    def test_the_scale_is_exact(self):
        found = ctypes.c_float(Config.kimi_k3(1).scale).value
        self.assertEqual(found, ctypes.c_float(2**-3.5).value)


class Kernels(unittest.TestCase):
    def test_compiled_then_cached_then_bundled(self):
        plan = Plan("sm_90a", Config.kimi_k3(2), [Policy(0, 1), Policy(2, 1)])
        with tempfile.TemporaryDirectory() as folder:
            first = plan.kernels(cache_folder=pathlib.Path(folder))
            second = plan.kernels(cache_folder=folder, compile=False)
        self.assertEqual([k.origin for k in first], ["compiled", "compiled"])
        self.assertEqual([k.origin for k in second], ["cache", "cache"])
        self.assertEqual([k.key for k in first], [k.key for k in second])
        decode, verify = first
        self.assertEqual((decode.verify_tokens, verify.verify_tokens), (0, 2))
        self.assertEqual(decode.arch, "sm_90a")
        self.assertEqual(decode.blocks_per_request, 2 * decode.cluster)
        report = (decode.registers, decode.spill_bytes, decode.shared_bytes)
        if driver() is None or driver().emulated or report != (None, None, None):
            # On a GPU's machine NVRTC may take a kernel from a cache of its own, without a report.
            self.assertGreater(decode.registers, 0)
            self.assertEqual(decode.spill_bytes, 0)
            self.assertGreater(decode.shared_bytes, 0)
        self.assertIn(decode.mode.replace("-", "_"), decode.entry)

        bundle = plan.bundle()
        third = plan.kernels(bundle=bundle, cache_folder="off", compile=False)
        self.assertEqual([k.origin for k in third], ["bundle", "bundle"])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "kda.bundle"
            path.write_bytes(bundle)
            fourth = plan.kernels(bundle=path, cache_folder="off", compile=False)
        self.assertEqual([k.key for k in third], [k.key for k in fourth])

        damaged = bundle[:-1] + bytes([bundle[-1] ^ 1])
        with self.assertRaisesRegex(ValueError, "no whole bundle"):
            plan.kernels(bundle=damaged)
        other = Plan("sm_90a", Config.kimi_k3(3), [Policy(0, 1)])
        with self.assertRaisesRegex(RuntimeError, "no source has kda_decode_h3"):
            other.kernels(bundle=bundle, cache_folder="off", compile=False)
        with self.assertRaisesRegex(OSError, "/nonexistent/kda.bundle"):
            plan.kernels(bundle="/nonexistent/kda.bundle")

    def test_other_threads_run_while_kernels_compile(self):
        counts = (0, 1, 2, 4, 8, 16)
        plan = Plan("sm_90a", Config.kimi_k3(5), [Policy(count, 1) for count in counts])
        plan.kernels(cache_folder="off")  # libnvrtc is loaded
        ticks, stop = [], threading.Event()

        def tick():
            while not stop.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        started = time.monotonic()
        plan.kernels(cache_folder="off")
        ended = time.monotonic()
        stop.set()
        thread.join()
        third = (ended - started) / 3
        # The middle third, far from both ends: a thread that must wait has no tick there.
        self.assertGreater(third, 0.01)
        self.assertGreater(len([t for t in ticks if started + third < t < ended - third]), 0)

    def test_the_library_s_records_reach_logging(self):
        plan = Plan("sm_90a", Config.kimi_k3(2), [Policy(0, 1)])
        with tempfile.NamedTemporaryFile() as file:
            # A file is no folder for a cache: a warning, not a failure.
            with self.assertLogs(level="WARNING") as records:
                plan.kernels(cache_folder=file.name)
        self.assertIn("kernel cache", records.output[0])


class WithoutDriver(unittest.TestCase):
    def test_a_missing_driver_is_a_runtime_error(self):
        if driver():
            self.skipTest("there is a driver")
        with self.assertRaisesRegex(RuntimeError, "driver library was not found"):
            prepared_kda.Kda(Config.kimi_k3(1), [Policy(0, 1)], device=0)


def changed(tensor, **fields):
    """A view of the same memory with another shape, strides or dtype."""
    now = dict(shape=tensor.shape, dtype=tensor.name, strides=tensor.strides, offset=tensor.offset)
    now.update(fields)
    return Tensor(tensor.memory, now["shape"], now["dtype"], now["strides"], now["offset"])


class Operands(unittest.TestCase):
    def setUp(self):
        self.fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        self.plan = self.plan_of(self.fixture)
        self.weights = self.fixture.weights(Host)
        self.good = self.fixture.operands(Host)

    def plan_of(self, fixture, **changes):
        policies = [Policy(0, 8), Policy(fixture.tokens, 8)]
        return Plan("sm_90a", fixture.config(**changes), policies)

    def launch(self, **changes):
        return self.plan.step(self.weights, **{**self.good, **changes})

    def test_every_golden_vector_is_a_step(self):
        for fixture in fixtures():
            with self.subTest(fixture.name):
                plan = Plan("sm_90a", fixture.config(), [fixture.policy])
                launch = plan.step(fixture.weights(Host), **fixture.operands(Host))
                self.assertEqual(launch.grid[1:], (fixture.requests, 1))
                self.assertEqual(launch.grid[0], fixture.heads * launch.cluster[0])

    def test_the_kernel_is_the_one_of_the_kind(self):
        self.assertEqual(self.launch().kernel, 1)
        decode = self.launch(accepted=None, projected=changed(self.good["projected"], shape=(2, 656)))
        self.assertEqual(decode.kernel, 0)

    def test_no_rows_are_no_launch(self):
        empty = changed(self.good["projected"], shape=(0, self.fixture.pitch))
        self.assertIsNone(self.launch(projected=empty))

    def test_longer_operands_are_fine(self):
        rows, dim = self.good["out"].shape
        out = Tensor.of(Host, (rows + 3, dim), "bfloat16")
        slots = Tensor.of(Host, (9, 7), "int32")
        # Tables wider than the step's tokens need longer conv lines, so the tokens are named.
        conv = Tensor.of(Host, (10, 384, 9), "bfloat16")
        accepted = Tensor.of(Host, (20,), "int32")
        launch = self.launch(out=out, slots=slots, conv_cache=conv, accepted=accepted, tokens=4)
        self.assertEqual(launch.grid[1], 2)

    def test_every_bad_operand_is_refused_by_name(self):
        good, host = self.good, Host
        projected, out, conv, state, slots = (
            good[k] for k in ("projected", "out", "conv_cache", "state", "slots")
        )
        for change, text in [
            (dict(projected=changed(projected, dtype="float32")), "projected has dtype float32, expected bfloat16"),
            (dict(projected=changed(projected, shape=(8, 640))), r"projected has shape \[8, 640\], expected \[rows, 641\]"),
            (dict(projected=changed(projected, shape=(7, 656))), "projected has 7 rows, no multiple of 4 tokens"),
            (dict(projected=changed(projected, strides=(656, 2))), "projected is not contiguous within"),
            (dict(projected=changed(projected, strides=(600, 1))), "projected has a stride of 600 elements, 641 needed"),
            (dict(projected=changed(projected, shape=(8, 656, 1), strides=(656, 1, 1))), "projected has shape"),
            (dict(out=changed(out, dtype="float16")), "out has dtype float16"),
            (dict(out=changed(out, shape=(8, 127))), r"out has shape \[8, 127\], expected \[rows, 128\]"),
            (dict(out=changed(out, shape=(7, 128))), "out holds 896 elements, 1024 needed"),
            (dict(out=changed(out, strides=(128, -1))), "out is not contiguous"),
            (dict(out=changed(out, strides=(-128, 1))), "out is not contiguous"),
            (dict(out=changed(projected, shape=(8, 128), strides=(656, 1))), "out is written and shares memory with qkv"),
            (dict(conv_cache=changed(conv, dtype="float32")), "conv_cache has dtype"),
            (dict(conv_cache=changed(conv, shape=(10, 6, 384))), r"conv_cache has shape .*, expected \[slots, 384, length\]"),
            (dict(conv_cache=changed(conv, shape=(9, 384, 6))), "conv_cache has 9 slots, state has 10"),
            (dict(conv_cache=changed(conv, shape=(10, 384, 5))), "conv_cache"),
            (dict(conv_cache=Tensor.of(host, (10, 384, 5), "bfloat16")), "conv_cache has 5 positions a line, 6 needed"),
            (dict(conv_cache=changed(conv, strides=(2304, 1, 384))), "conv_cache is not contiguous"),
            (dict(state=changed(state, dtype="bfloat16")), "state has dtype bfloat16, expected float32"),
            (dict(state=changed(state, shape=(10, 2, 64, 128))), r"state has shape .*, expected \[slots, 1, 128, 128\]"),
            (dict(state=changed(state, strides=(16384, 16384, 1, 128))), "state is not contiguous"),
            (dict(state=changed(state, offset=1, shape=(9, 1, 128, 128)), conv_cache=changed(conv, shape=(9, 384, 6))), "not a multiple of 16 bytes"),
            (dict(state=conv), "state has dtype"),
            (dict(state_source=changed(state, shape=(9, 1, 128, 128))), "state_source has 9 slots, state has 10"),
            (dict(slots=changed(slots, dtype="int64")), "slots has dtype int64, expected int32"),
            (dict(slots=changed(slots, shape=(1, 4))), "slots holds 4 elements, 8 needed"),
            (dict(slots=changed(slots, shape=(2, 2)), tokens=4), "slots has 2 columns, 4 needed"),
            (dict(slots=changed(slots, strides=(1, 2))), "slots is not contiguous"),
            (dict(slots=changed(slots, shape=(2, 2, 2), strides=(4, 2, 1))), "slots has shape"),
            (dict(accepted=changed(good["accepted"], shape=(1,))), "accepted holds 1 elements, 2 needed"),
            (dict(accepted=changed(good["accepted"], strides=(2,))), "accepted is not contiguous"),
            (dict(accepted=changed(good["accepted"], shape=(2, 1), strides=(1, 1))), "accepted has shape"),
            (dict(accepted=None, tokens=4), "accepted is missing in a step of 4 tokens"),
            (dict(tokens=3), "projected has 8 rows, no multiple of 3 tokens"),
            (dict(tokens=2), "no verify 2 kernel is prepared"),
            (dict(qkv=projected), "qkv was given beside projected"),
        ]:
            with self.subTest(text, change=list(change)), self.assertRaisesRegex(ValueError, text):
                self.launch(**change)
        for change, text in [
            (dict(out=None), "out is missing"),
            (dict(slots=None), "slots is missing"),
            (dict(state=[1, 2, 3]), "state is a list, which has neither data_ptr nor an array interface"),
            (dict(stat=state), "stat is no operand"),
            (dict(stream=0), "stream is no operand"),
        ]:
            with self.subTest(text), self.assertRaisesRegex(TypeError, text):
                self.launch(**change)

    def test_records_and_token_counts_are_checked(self):
        plan = self.plan_of(self.fixture, rollback="records", ragged=True)
        records = Tensor.of(Host, (10, 3, 1, 3, 128), "float32")
        counts = Tensor.of(Host, (2,), "int32")
        good = dict(self.good, records=records, token_counts=counts, tokens=4)
        self.assertEqual(plan.step(self.weights, **good).grid[1], 2)
        for change, text in [
            (dict(records=None), "records has address 0"),
            (dict(tokens=None), "tokens is missing in a verify step that keeps records"),
            (dict(records=changed(records, dtype="bfloat16")), "records has dtype bfloat16, expected float32"),
            (dict(records=changed(records, shape=(10, 3, 3, 128), strides=(1152, 384, 128, 1))), r"records has shape .*, expected \[slots, records, 1, 3, 128\]"),
            (dict(records=changed(records, shape=(9, 3, 1, 3, 128))), "records has 9 slots, state has 10"),
            (dict(records=changed(records, shape=(10, 2, 1, 3, 128))), "records has 2 records a slot, 3 needed"),
            (dict(records=changed(records, strides=(1152, 384, 384, 1, 3))), "records is not contiguous"),
            (dict(token_counts=None), "token_counts has address 0"),
            (dict(token_counts=changed(counts, shape=(1,))), "token_counts holds 1 elements, 2 needed"),
            (dict(token_counts=changed(counts, dtype="int64")), "token_counts has dtype int64"),
        ]:
            with self.subTest(text, change=list(change)), self.assertRaisesRegex(ValueError, text):
                plan.step(self.weights, **{**good, **change})
        for name, given in [("records", records), ("token_counts", counts)]:
            with self.assertRaisesRegex(ValueError, f"{name} was given, but"):
                self.launch(**{name: given})

    def test_more_requests_than_prepared(self):
        plan = Plan("sm_90a", self.fixture.config(), [Policy(4, 1)])
        with self.assertRaisesRegex(ValueError, "verify 4 kernels are prepared up to 1 requests, 2 asked"):
            plan.step(self.weights, **self.good)

    def test_the_projection_may_come_in_parts(self):
        packed = self.good["projected"]
        parts = {
            name: changed(packed, shape=(8, width), offset=offset)
            for name, offset, width in [
                ("qkv", 0, 384),
                ("output_gate", 384, 128),
                ("f_a", 512, 128),
                ("beta", 640, 1),
            ]
        }
        self.assertEqual(self.launch(projected=None, **parts).grid, self.launch().grid)
        short = changed(packed, shape=(7, 128), offset=512)
        with self.assertRaisesRegex(ValueError, "f_a has 7 rows, qkv has 8"):
            self.launch(projected=None, **{**parts, "f_a": short})
        with self.assertRaisesRegex(TypeError, "beta is missing"):
            self.launch(projected=None, **{**parts, "beta": None})
        with self.assertRaisesRegex(TypeError, "qkv is missing"):
            self.launch(projected=None)

    def test_a_projected_gate_takes_the_place_of_f_a_and_f_b(self):
        plan = self.plan_of(self.fixture, gate_input="projected")
        attention = self.fixture.attention(Host)
        given = dict(
            conv=prepared_kda.decode_conv_weight(attention.conv1d.weight),
            a_log=attention.A_log,
            dt_bias=attention.dt_bias,
            norm=attention.o_norm.weight,
        )
        weights = prepared_kda.Weights(**given)
        gate = Tensor.of(Host, (8, 130), "bfloat16")
        gate = changed(gate, shape=(8, 128), offset=1)
        packed = self.good["projected"]
        parts = {
            name: changed(packed, shape=(8, width), offset=offset)
            for name, offset, width in [("qkv", 0, 384), ("output_gate", 384, 128), ("beta", 640, 1)]
        }
        low_rank = {**self.good, "gate_input": gate}
        with self.assertRaisesRegex(ValueError, "gate_input was given, but the configuration has a low-rank gate"):
            self.plan.step(self.weights, **low_rank)
        for step in (low_rank, {**low_rank, **parts, "projected": None}):
            self.assertEqual(plan.step(weights, **step).grid, self.launch().grid)
            for change, text in [
                (dict(gate_input=changed(gate, shape=(7, 128))), "gate_input has 7 rows"),
                (dict(gate_input=changed(gate, shape=(8, 127))), r"gate_input has shape \[8, 127\], expected \[rows, 128\]"),
                (dict(gate_input=changed(gate, strides=(127, 1))), "gate_input has a stride of 127 elements, 128 needed"),
                (dict(gate_input=changed(gate, strides=(130, 2))), "gate_input is not contiguous within"),
                (dict(gate_input=changed(gate, dtype="float16")), "gate_input has dtype float16"),
                (dict(out=gate), "out is written and shares memory with gate_input"),
            ]:
                with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                    plan.step(weights, **{**step, **change})
            with self.assertRaisesRegex(TypeError, "gate_input is missing"):
                plan.step(weights, **{**step, "gate_input": None})
            with self.assertRaisesRegex(ValueError, "f_b was given, but the configuration has a projected gate"):
                plan.step(self.weights, **step)
        with self.assertRaisesRegex(ValueError, "f_a was given, but the configuration has a projected gate"):
            plan.step(weights, **{**step, "f_a": changed(packed, shape=(8, 128), offset=512)})
        with self.assertRaisesRegex(ValueError, "f_b has address 0"):
            self.plan.step(weights, **self.good)

    def test_both_cache_layouts(self):
        plan = self.plan_of(self.fixture, conv_layout="token-first")
        turned = Tensor.of(Host, (10, 6, 384), "bfloat16")
        self.assertIsNotNone(plan.step(self.weights, **{**self.good, "conv_cache": turned}))
        with self.assertRaisesRegex(ValueError, r"expected \[slots, length, 384\]"):
            plan.step(self.weights, **self.good)

    def test_page_major_pools_and_table_columns(self):
        # One page holds this layer's state, then its conv lines, then other layers'.
        page_bytes = 4 * 16384 + 2 * 384 * 6 + 4096
        pages = Host(10 * page_bytes)
        state = Tensor(pages, (10, 1, 128, 128), "float32", (page_bytes // 4, 16384, 128, 1))
        conv = Tensor(pages, (10, 384, 6), "bfloat16", (page_bytes // 2, 6, 1), offset=2 * 16384)
        table = Tensor.of(Host, (2, 40), "int32")
        slots = Tensor(table.memory, (2, 4), "int32", (40, 1), offset=3)
        self.assertIsNotNone(self.launch(state=state, conv_cache=conv, slots=slots))
        shifted = Tensor(pages, (10, 384, 6), "bfloat16", (page_bytes // 2, 6, 1), offset=2 * 16384 - 8)
        with self.assertRaisesRegex(ValueError, "state_pool is written and shares memory with conv_cache"):
            self.launch(state=state, conv_cache=shifted)

    def test_one_row_s_stride_means_nothing(self):
        projected = changed(self.good["projected"], shape=(4, 656), strides=(656, 1))
        slots = changed(self.good["slots"], shape=(1, 4), strides=(1, 1))
        self.assertIsNotNone(self.launch(projected=projected, slots=slots))

    def test_array_interfaces(self):
        for cuda in (False, True):
            shown = {name: Interface(tensor, cuda) for name, tensor in self.good.items()}
            self.assertEqual(self.launch(**shown).grid, self.launch().grid)
        dense = Interface(self.good["state"])
        dense.__array_interface__["strides"] = None
        self.assertEqual(self.launch(state=dense).grid, self.launch().grid)
        for name in ("out", "conv_cache", "state"):
            with self.assertRaisesRegex(ValueError, f"{name} is written, but read-only"):
                self.launch(**{name: Interface(self.good[name], read_only=True)})
        with self.assertRaisesRegex(ValueError, "slots has dtype <i8, expected int32"):
            self.launch(slots=Interface(changed(self.good["slots"], dtype="int64")))
        with self.assertRaisesRegex(ValueError, "state has dtype <u2, expected float32"):
            self.launch(state=Interface(changed(self.good["state"], dtype="bfloat16")))
        with self.assertRaisesRegex(ValueError, "out has dtype <f4, expected bfloat16"):
            self.launch(out=Interface(changed(self.good["out"], dtype="float32")))
        odd = Interface(self.good["projected"])
        odd.__array_interface__["strides"] = (1313, 2)
        with self.assertRaisesRegex(ValueError, "projected has a stride of 1313 bytes"):
            self.launch(projected=odd)

    def test_hostile_interfaces_raise(self):
        for entry, found in [
            ("shape", (2**40, 2**40)),
            ("shape", (0, 2**40, 2**40)),
            ("shape", (-1, 5)),
            ("shape", 7),
            ("shape", (1,) * 9),
            ("strides", (1,)),
            ("strides", "ab"),
            ("data", None),
            ("data", (-5, False)),
            ("typestr", None),
        ]:
            shown = Interface(self.good["projected"])
            shown.__array_interface__["strides"] = None
            shown.__array_interface__[entry] = found
            with self.subTest(entry, found=found):
                with self.assertRaises((ValueError, TypeError, OverflowError)):
                    self.launch(projected=shown)

    @unittest.skipUnless(numpy, "numpy is not installed")
    def test_numpy_arrays(self):
        given = dict(
            projected=numpy.zeros((8, 656), numpy.uint16),
            out=numpy.zeros((8, 128), numpy.uint16),
            conv_cache=numpy.zeros((10, 384, 6), numpy.uint16),
            state=numpy.zeros((10, 1, 128, 128), numpy.float32),
            slots=numpy.zeros((2, 9), numpy.int32)[:, 2:6],
            accepted=numpy.ones(2, numpy.int32),
        )
        self.assertEqual(self.plan.step(self.weights, **given).grid, self.launch().grid)
        given["slots"] = given["slots"].astype(numpy.int64)
        with self.assertRaisesRegex(ValueError, "slots has dtype <i8"):
            self.plan.step(self.weights, **given)

    def test_weights_are_checked(self):
        attention = self.fixture.attention(Host)
        good = dict(
            conv=prepared_kda.decode_conv_weight(attention.conv1d.weight),
            f_b=attention.f_b_proj.weight,
            a_log=attention.A_log,
            dt_bias=attention.dt_bias,
            norm=attention.o_norm.weight,
        )
        for change, text in [
            (dict(conv=attention.conv1d.weight), r"conv has shape \[384, 1, 4\], expected \[3, 4, dim\]"),
            (dict(f_b=good["norm"]), "f_b has dtype float32, expected bfloat16"),
            (dict(norm=good["f_b"]), "norm has dtype bfloat16, expected float32"),
            (dict(f_b=good["f_b"].transpose(0, 1)), "f_b is not contiguous"),
            (dict(a_log=changed(good["a_log"], dtype="int32")), "a_log has dtype int32"),
        ]:
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                prepared_kda.Weights(**{**good, **change})
        short = prepared_kda.Weights(**{**good, "norm": changed(good["norm"], shape=(127,))})
        with self.assertRaisesRegex(ValueError, "norm holds 127 elements, 128 needed"):
            self.plan.step(short, **self.good)
        biased = prepared_kda.Weights(**good, conv_bias=Tensor.of(Host, (384,), "float32"))
        with self.assertRaisesRegex(ValueError, "conv_bias was given, but the configuration has no conv bias"):
            self.plan.step(biased, **self.good)
        wanting = self.plan_of(self.fixture, conv_bias=True)
        with self.assertRaisesRegex(ValueError, "conv_bias has address 0"):
            wanting.step(self.weights, **self.good)

    def test_other_devices_tensors_are_refused(self):
        elsewhere = changed(self.good["out"])
        elsewhere.device.type = "xpu"
        with self.assertRaisesRegex(ValueError, "out is on xpu, expected cuda"):
            self.launch(out=elsewhere)

    def test_unknown_dtypes_are_named(self):
        strange = changed(self.good["out"])
        strange.dtype = Dtype("float8_e4m3fn")
        with self.assertRaisesRegex(ValueError, "out has dtype float8_e4m3fn, expected bfloat16"):
            self.launch(out=strange)


if __name__ == "__main__":
    unittest.main()
