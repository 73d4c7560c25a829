"""What the drop-in class makes of a layer and its policies; no driver: the native object is replaced
by one that remembers how it was made."""

import array
import subprocess
import sys
import types
import unittest
from unittest import mock

import prepared_kda
from prepared_kda import Policy, PreparedKda, prepared
from support import Fixture, FIXTURES, Host, Tensor, fixtures

MODE = "split4-128x8-cluster"


class Recorded:
    """Stands for ``Kda``."""

    def __init__(self, config, policies, **options):
        self.config, self.asked, self.options = config, policies, options
        self.kernels = [f"kernel {i}" for i in range(len(policies))]
        self.policies = [(p.verify_tokens, p.max_requests, i) for i, p in enumerate(policies)]
        self.checked, self.ran = [], []

    def check_caches(self, **pools):
        self.checked.append(pools)

    def run(self, weights, **given):
        self.ran.append(given)


class DropIn(unittest.TestCase):
    def setUp(self):
        self.fixture = Fixture(FIXTURES / "verify_h1_b2_t4.safetensors")
        for name, value in [("Kda", Recorded), ("_shared", {})]:
            patch = mock.patch.object(prepared, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def prepare(self, fixture=None, policies=None, dim_first=True, **keywords):
        fixture = fixture or self.fixture
        policies = policies or {1: (fixture.pitch, 0)}
        kda = PreparedKda(
            fixture.attention(Host), policies, dim_first, **{"host_memory": True, **keywords}
        )
        given = fixture.operands(Host)
        return kda.prepare_caches((given["conv_cache"], given["state"])), given

    def test_policies(self):
        pitch = self.fixture.pitch
        keys = {1: (pitch, 0), 8: (pitch, MODE), (2, 4): (pitch, None), (3, 1): (pitch, 2)}
        kda, _ = self.prepare(policies=keys)
        self.assertEqual(
            kda.kda.asked,
            [Policy(0, 1, None), Policy(0, 8, MODE), Policy(4, 2, None), Policy(1, 3, None)],
        )
        self.assertEqual(
            kda.kernels, {key: f"kernel {i}" for i, key in enumerate(keys)}
        )
        self.assertIs(kda.policies, keys)
        with self.assertRaisesRegex(ValueError, r"policy \(2, 4\) has pitch 640, at least 641"):
            self.prepare(policies={1: (pitch, 0), (2, 4): (640, 0)})

    def test_the_configuration_is_the_layer_s(self):
        for fixture in fixtures():
            for dim_first, layout in [(True, "dim-first"), (False, "token-first")]:
                kda, _ = self.prepare(fixture, dim_first=dim_first)
                self.assertEqual(kda.kda.config, fixture.config(conv_layout=layout))
        kda, _ = self.prepare(null_rule="negative", early_reads="caches")
        self.assertEqual(
            kda.kda.config, self.fixture.config(null_rule="negative", early_reads="caches")
        )
        attention = self.fixture.attention(Host)
        attention.o_norm.eps = 0.5
        kda = PreparedKda(attention, {1: (641, 0)}, True, host_memory=True)
        state = Tensor.of(Host, (4, 1, 128, 128), "bfloat16")
        kda.prepare_caches((Tensor.of(Host, (4, 384, 3), "bfloat16"), state))
        self.assertEqual(kda.kda.config, self.fixture.config(eps=0.5, state_dtype="bf16"))
        self.assertEqual((kda.heads, kda.dim, kda.has_bias), (1, 128, False))

    def test_where_kernels_come_from_and_where_they_run(self):
        kda, given = self.prepare(
            policy_file=b"modes",
            bundle=b"kernels",
            cache_folder="off",
            nvrtc_folder="/opt",
            compile=False,
        )
        self.assertEqual(
            kda.kda.options,
            dict(
                policy_file=b"modes",
                bundle=b"kernels",
                cache_folder="off",
                nvrtc_folder="/opt",
                compile=False,
                device=0,
                host_memory=True,
                stream=0,
            ),
        )
        (checked,) = kda.kda.checked
        self.assertIs(checked["state"], given["state"])
        with self.assertRaisesRegex(ValueError, "the weights are on cpu, expected cuda"):
            self.prepare(host_memory=False)
        attention = self.fixture.attention(Host)
        attention.dt_bias.device = types.SimpleNamespace(type="cuda", index=3)
        with mock.patch.object(prepared, "_current_stream", lambda device: 70 + device.index):
            kda = PreparedKda(attention, {1: (641, 0)}, True)
            caches = (given["conv_cache"], given["state"])
            kda.prepare_caches(caches)
            self.assertEqual((kda.kda.options["device"], kda.kda.options["stream"]), (3, 73))
            kda.run(given["projected"], given["out"], caches=caches, slots=given["slots"])
        (ran,) = kda.kda.ran
        self.assertEqual(ran["stream"], 73)
        self.assertIsNone(ran["accepted"])
        self.assertIs(ran["conv_cache"], given["conv_cache"])

    def test_the_decode_layout_of_the_conv_weight(self):
        channels = 3 * 256
        weight = Tensor.of(
            Host, (channels, 1, 4), "float32", array.array("f", range(4 * channels)).tobytes()
        )
        found = prepared_kda.decode_conv_weight(weight)
        self.assertEqual(found.shape, (3, 4, 256))
        expected = [
            4 * (256 * part + channel) + tap
            for part in range(3)
            for tap in range(4)
            for channel in range(256)
        ]
        self.assertEqual(found.tolist(), expected)

    def test_weights_are_copied_only_where_they_must_be(self):
        attention = self.fixture.attention(Host)
        kda = PreparedKda(attention, {1: (641, 0)}, True)
        for name, tensor in [
            ("dt_bias", attention.dt_bias),
            ("a_log", attention.A_log),
            ("f_b", attention.f_b_proj.weight),
            ("norm", attention.o_norm.weight),
        ]:
            self.assertEqual(kda.weights[name].data_ptr(), tensor.data_ptr(), name)
        narrow = Tensor.of(Host, (128,), "bfloat16", b"\x80\x3f" * 128)
        attention.o_norm.weight = narrow
        kda = PreparedKda(attention, {1: (641, 0)}, True)
        self.assertEqual(kda.weights["norm"].tolist(), [1.0] * 128)


class Imports(unittest.TestCase):
    def test_no_tensor_library_is_imported(self):
        code = "import sys, prepared_kda; print({'torch', 'numpy'} & set(sys.modules))"
        found = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True
        )
        self.assertEqual(found.stdout.strip(), "set()")


if __name__ == "__main__":
    unittest.main()
