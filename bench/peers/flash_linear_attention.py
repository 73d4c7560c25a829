"""Times a decode step of flash-linear-attention's kernels the way `cargo xtask bench` times ours.

A graph holds the launches of every layer, each with weights and caches of its own; the projection is
shared; a read of 1 GiB evicts L2 before each timed replay; five other streams are used first; the
time is the median over the replays, divided by the layers. The step is the library's fastest: the
state pool is updated in place through slots, which its public API does not reach; the conv caches
have no slots; every input is contiguous. Its conv takes q, k and v at once where one request makes
their outputs contiguous, else in three launches.
"""

import argparse
import json
import statistics
from importlib.metadata import version

import torch
import torch.nn.functional as F
from fla.modules import FusedRMSNormGated
from fla.modules.causal_conv1d import causal_conv1d_update
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

DIM, TAPS, LOWER_BOUND, EPS = 128, 4, -5.0, 1e-5
WARM_UPS = 3


class Inputs:
    """What a projection leaves, of every layer; slots and the output."""

    def __init__(self, requests, heads):
        dim = heads * DIM
        normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        self.qkv = normal(3, requests, dim)
        self.gate = normal(requests, 1, heads, DIM)
        self.f_a = normal(requests, DIM)
        self.beta = normal(requests, 1, heads)
        # Slot 0 stays unused, as it is null elsewhere.
        self.slots = (torch.randperm(requests, device="cuda") + 1).to(torch.int32)
        self.recurrent = torch.empty(requests, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)


class Layer:
    """Weights and caches."""

    def __init__(self, requests, heads, v_first):
        dim = heads * DIM
        normal = lambda *shape: torch.randn(*shape, device="cuda")
        self.heads, self.v_first = heads, v_first
        self.conv_weight = normal(3, dim, TAPS) / 2
        self.conv_cache = normal(3, requests, dim, TAPS).bfloat16()
        self.f_b = (normal(dim, DIM) / DIM**0.5).bfloat16()
        self.a_log = normal(heads) / 4
        self.dt_bias = normal(dim) / 4
        self.norm = FusedRMSNormGated(DIM, eps=EPS, activation="sigmoid", device="cuda")
        self.norm.weight.data.uniform_(0.5, 1.5)
        self.state = normal(requests + 1, heads, DIM, DIM) / 8

    def convolve(self, x):
        if x.shape[1] == 1:
            weight, cache = self.conv_weight.flatten(0, 1), self.conv_cache.view(1, -1, TAPS)
            y, _ = causal_conv1d_update(x.view(1, -1), cache, weight=weight, activation="silu")
            return y.view(x.shape)
        parts = zip(x, self.conv_cache, self.conv_weight)
        return [causal_conv1d_update(p, c, weight=w, activation="silu")[0] for p, c, w in parts]

    def step(self, inputs):
        shape = inputs.recurrent.shape
        q, k, v = (part.view(shape) for part in self.convolve(inputs.qkv))
        fused_recurrent_kda_fwd(
            q,
            k,
            v,
            F.linear(inputs.f_a, self.f_b).view(shape),
            inputs.beta,
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            initial_state=self.state,
            scale=DIM**-0.5,
            inplace_final_state=True,
            state_v_first=self.v_first,
            ssm_state_indices=inputs.slots,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=LOWER_BOUND,
            out=inputs.recurrent,
        )
        return self.norm(inputs.recurrent, inputs.gate)

    def formula(self, inputs):
        """The same step in plain torch: output, state [requests, heads, value, key], conv caches."""
        requests = inputs.f_a.shape[0]
        split = lambda x: x.float().view(requests, self.heads, DIM)
        windows = torch.cat([self.conv_cache[..., 1:], inputs.qkv.unsqueeze(-1)], dim=-1)
        conv = F.silu((windows.float() * self.conv_weight.unsqueeze(1)).sum(-1)).bfloat16()
        q, k, v = (split(part) for part in conv)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = split((inputs.f_a.float() @ self.f_b.float().T).bfloat16())
        g = (g + self.dt_bias.view(self.heads, DIM)) * self.a_log.exp().unsqueeze(-1)
        state = self.state[inputs.slots.long()]
        if not self.v_first:
            state = state.transpose(-1, -2)
        state = state * (LOWER_BOUND * g.sigmoid()).exp().unsqueeze(-2)
        beta = inputs.beta.float().view(requests, self.heads, 1).sigmoid()
        v = (v - (state * k.unsqueeze(-2)).sum(-1)) * beta
        state = state + v.unsqueeze(-1) * k.unsqueeze(-2)
        out = (state * q.unsqueeze(-2)).sum(-1) * DIM**-0.5
        out = out * (out.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.weight
        out = out * split(inputs.gate).sigmoid()
        return out.view(inputs.recurrent.shape), state, windows

    def check(self, inputs):
        """Runs one step and compares it with the formula; bf16 rounds between its launches."""
        out, state, windows = self.formula(inputs)
        found = self.step(inputs).float()
        torch.cuda.synchronize()
        found_state = self.state[inputs.slots.long()]
        if not self.v_first:
            found_state = found_state.transpose(-1, -2)
        error = lambda a, b: ((a - b).norm() / b.norm()).item()
        errors = {"out": error(found, out), "state": error(found_state, state)}
        assert torch.equal(self.conv_cache, windows), "conv cache"
        assert errors["out"] < 1e-2 and errors["state"] < 1e-2, errors
        return errors


def measure(layers, inputs, evicted, replays):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Compiles, tunes and warms what a capture may not.
        for layer in layers[:1] * 3:
            layer.step(inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in layers:
                layer.step(inputs)
        times = []
        for replay in range(WARM_UPS + replays):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evicted.sum()
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / len(layers))
    times = sorted(times[WARM_UPS:])
    return statistics.median(times), times[0], times[len(times) * 9 // 10]


@torch.no_grad()
def main():
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=numbers, default=[12])
    parser.add_argument("--batch", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=69)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--check", action="store_true", help="compare with plain torch, time nothing")
    parser.add_argument("--out", help="file to append one JSON line a measurement to")
    options = parser.parse_args()

    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    evicted = torch.zeros(1 << 28, device="cuda")
    # A process that has used few streams replays graphs faster than a serving process does.
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            evicted[:1024].sum()
    torch.cuda.synchronize()
    name = f"flash-linear-attention {version('fla-core')}"
    for heads in options.heads:
        for requests in options.batch:
            for v_first in (False, True):
                count = 1 if options.check else options.layers
                inputs = Inputs(requests, heads)
                layers = [Layer(requests, heads, v_first) for _ in range(count)]
                convs = 1 if requests == 1 else 3
                mode = f"conv x{convs}, F_B, recurrence, norm; {'v' if v_first else 'k'} first"
                if options.check:
                    print(f"{heads:5} {requests:5}  {layers[0].check(inputs)}  {mode}")
                    continue
                us, least, p90 = measure(layers, inputs, evicted, options.replays)
                print(f"{heads:5} {requests:5} {us:8.3f} {least:8.3f} {p90:8.3f}  {mode}", flush=True)
                line = {"implementation": name, "setting": "layers", "heads": heads, "tokens": 1}
                line |= {"requests": requests, "mode": mode, "us": us, "min_us": least, "p90_us": p90}
                if options.out:
                    with open(options.out, "a") as file:
                        file.write(json.dumps(line) + "\n")
                del layers, inputs


if __name__ == "__main__":
    main()
