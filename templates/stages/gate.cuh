// decay[k] from the gate's input g: the low-rank F_B F_A in f32, or an operand; then the model's
// nonlinearity. Eight lanes share a gate of low rank; each sums two runs of eight products, then the
// tree 4, 2, 1. Of a projected gate each thread takes every THREADS-th.
constexpr int GATE_RANK = 128;
constexpr int GATE_LANES = 8;
constexpr int GATE_GROUPS = THREADS / GATE_LANES;
constexpr int GATE_ROWS = SHARED_GATE ? HEAD_DIM / VALUE_SPLIT : HEAD_DIM;  // gates of this block
constexpr int GATE_PASSES = GATE_ROWS > GATE_GROUPS && !PROJECTED_GATE ? GATE_ROWS / GATE_GROUPS : 1;
constexpr int GATE_COPIES = GATE_LANES / GATE_PASSES;  // lanes that end up with the same gate
constexpr int GATE_BIASES = PROJECTED_GATE && THREADS < HEAD_DIM ? HEAD_DIM / THREADS : 1;
static_assert(GATE_PASSES <= GATE_LANES, "too few threads for the gates of a block");
static_assert(!(PROJECTED_GATE && SHARED_GATE), "every block reads all projected gates");

struct GateWeights {
    uint4 f_b[GATE_PASSES][2];
    float a_log;
    float dt_bias[GATE_BIASES];
};

// The low-rank gate this lane finishes, or its n-th projected one, within the head.
__device__ __forceinline__ int own_gate(int n, int rank) {
    if constexpr (PROJECTED_GATE) return (n * THREADS + threadIdx.x) % HEAD_DIM;
    int group = threadIdx.x / GATE_LANES;
    int pass = threadIdx.x % GATE_LANES / GATE_COPIES;
    int base = SHARED_GATE ? rank * GATE_ROWS : 0;
    return base + min(pass * GATE_GROUPS + group, GATE_ROWS - 1);
}

__device__ __forceinline__ void load_gate_weights(GateWeights& w, const bf16_bits* f_b, const float* a_log,
                                                  const float* dt_bias, int head, int rank) {
    int group = threadIdx.x / GATE_LANES;
    int lane = threadIdx.x % GATE_LANES;
    int base = head * HEAD_DIM + (SHARED_GATE ? rank * GATE_ROWS : 0);
#pragma unroll
    for (int pass = 0; pass < (PROJECTED_GATE ? 0 : GATE_PASSES); ++pass) {
        int gate = base + min(pass * GATE_GROUPS + group, GATE_ROWS - 1);
        const bf16_bits* row = f_b + gate * GATE_RANK + lane * 8;
        w.f_b[pass][0] = load_weights8(row);
        w.f_b[pass][1] = load_weights8(row + GATE_RANK / 2);
    }
    w.a_log = load_weight(a_log + head);
#pragma unroll
    for (int n = 0; n < GATE_BIASES; ++n)
        w.dt_bias[n] = load_weight(dt_bias + head * HEAD_DIM + own_gate(n, rank));
}

// Blocks of a latency-bound cluster pass F_A through shared memory: one load a thread, whatever the
// alignment of its rows. Where throughput counts each group of lanes loads it into registers, which
// saves a barrier (H200, 128 requests: 61.7 against 59.9 microseconds).
constexpr int INPUT_PASSES = (CHUNK * GATE_RANK + THREADS - 1) / THREADS;
static_assert(GATE_RANK == HEAD_DIM, "a row of F_A is as wide as a head's projected gates");

struct GateInputs {
    bf16_bits bits[INPUT_PASSES];  // staged, or the projected gates themselves
    uint4 run[CHUNK][2];           // not staged: this lane's 16 values of each token
};

__device__ __forceinline__ u32 load_pair(const bf16_bits* address) {
    return (u32)load_cached_bits(address) | (u32)load_cached_bits(address + 1) << 16;
}

// Eight bf16 values at any alignment.
__device__ __forceinline__ uint4 load_run(const bf16_bits* address, bool aligned) {
    if (aligned) {
        uint2 low = load_bits4(address), high = load_bits4(address + 4);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
    return make_uint4(load_pair(address), load_pair(address + 2), load_pair(address + 4), load_pair(address + 6));
}

// Rows of F_A, or a head's part of the projected gate, of tokens first .. first + CHUNK - 1; those past
// the last repeat it.
__device__ __forceinline__ void load_gate_inputs(GateInputs& in, const bf16_bits* rows, int first, i64 pitch) {
    if constexpr (STAGED_INPUT || PROJECTED_GATE) {
#pragma unroll
        for (int pass = 0; pass < INPUT_PASSES; ++pass) {
            int i = pass * THREADS + threadIdx.x;
            int token = min(first + i / GATE_RANK, TOKENS - 1);
            in.bits[pass] = load_input(rows + token * pitch + i % GATE_RANK);
        }
    } else {
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            const bf16_bits* row = rows + min(first + t, TOKENS - 1) * pitch;
            bool aligned = ((u64)row & 7) == 0;
            in.run[t][0] = load_run(row + threadIdx.x % GATE_LANES * 8, aligned);
            in.run[t][1] = load_run(row + GATE_RANK / 2 + threadIdx.x % GATE_LANES * 8, aligned);
        }
    }
}

__device__ __forceinline__ void stage_gate_inputs(Shared& shared, const GateInputs& in, int first) {
#pragma unroll
    for (int pass = 0; pass < INPUT_PASSES; ++pass) {
        int i = pass * THREADS + threadIdx.x;
        if (first + i / GATE_RANK < TOKENS) shared.f_a[first + i / GATE_RANK][i % GATE_RANK] = in.bits[pass];
    }
}

// Sum of eight products in order.
__device__ __forceinline__ float dot_run(uint4 a, uint4 b) {
    float sum = __fmul_rn(widen_low(a.x), widen_low(b.x));
    sum = __fmaf_rn(widen_high(a.x), widen_high(b.x), sum);
    sum = __fmaf_rn(widen_low(a.y), widen_low(b.y), sum);
    sum = __fmaf_rn(widen_high(a.y), widen_high(b.y), sum);
    sum = __fmaf_rn(widen_low(a.z), widen_low(b.z), sum);
    sum = __fmaf_rn(widen_high(a.z), widen_high(b.z), sum);
    sum = __fmaf_rn(widen_low(a.w), widen_low(b.w), sum);
    return __fmaf_rn(widen_high(a.w), widen_high(b.w), sum);
}

// exp(lower_bound sigmoid(a (g + dt_bias))). The exponent is kept in two parts: an f32 exponent of
// size 5 alone would cost the decay 2.4e-7.
__device__ __forceinline__ float decay_lower_bound(float g, float a, float dt_bias, float lower_bound) {
    float z = __fmul_rn(a, __fadd_rn(g, dt_bias));
    float e = exp_accurate(min_nan(max_nan(-z, -87.0f), 87.0f), 0.0f);
    float d = __fadd_rn(1.0f, e);
    float d_low = e < 1.0f ? __fadd_rn(e, -__fadd_rn(d, -1.0f)) : __fadd_rn(1.0f, -__fadd_rn(d, -e));
    float r = reciprocal_approx(d);
    float residue = __fmaf_rn(-d_low, r, __fmaf_rn(-d, r, 1.0f));
    float exponent = __fmul_rn(lower_bound, r);
    float low = __fmaf_rn(lower_bound, __fmul_rn(r, residue), __fmaf_rn(lower_bound, r, -exponent));
    return exp_accurate(max_nan(exponent, -87.0f), low);
}

// exp(-exp(A_log) softplus(g + dt_bias)).
__device__ __forceinline__ float decay_softplus(float g, float a_log, float a, float dt_bias) {
    float x = __fadd_rn(g, dt_bias);
    float back = __fadd_rn(x, -g);
    float x_low = __fadd_rn(__fadd_rn(g, -__fadd_rn(x, -back)), __fadd_rn(dt_bias, -back));
    // From 2^24 on no exponential sees it; it would only overflow one, or be inf - inf.
    if (!(fabsf(x) < 16777216.0f)) x_low = 0.0f;
    float rate;
    if (x < -17.0f) {
        // softplus(x) = e^x here; one exponential of the sum survives where e^x alone underflows.
        rate = exp_accurate(min_nan(max_nan(__fadd_rn(min_nan(a_log, 88.72283f), x), -87.0f), 88.0f), x_low);
    } else {
        float e = exp_accurate(max_nan(-fabsf(x), -87.0f), x > 0.0f ? -x_low : x_low);
        rate = __fmul_rn(a, __fadd_rn(max_nan(x, 0.0f), log1p_accurate(e)));
    }
    return exp_accurate(max_nan(-rate, -87.0f), 0.0f);
}

__device__ __forceinline__ float rate_of(const GateWeights& w) {
    return exp_accurate(min_nan(max_nan(w.a_log, -87.0f), 88.72283f), 0.0f);
}

__device__ __forceinline__ float decay_of(float g, const GateWeights& w, float a, float dt_bias, float lower_bound) {
    return LOWER_BOUND_GATE ? decay_lower_bound(g, a, dt_bias, lower_bound) : decay_softplus(g, w.a_log, a, dt_bias);
}

// Computes the gates of tokens first .. first + CHUNK - 1 from their projected inputs.
__device__ __forceinline__ void compute_projected_gates(Shared& shared, const GateWeights& w, const GateInputs& in,
                                                        int first, float lower_bound) {
    float a = rate_of(w);
#pragma unroll
    for (int pass = 0; pass < INPUT_PASSES; ++pass) {
        int i = pass * THREADS + threadIdx.x;
        int token = first + i / HEAD_DIM;
        if (token >= TOKENS) continue;
        float g = widen(in.bits[pass]);
        shared.decay[token][i % HEAD_DIM] = decay_of(g, w, a, w.dt_bias[pass % GATE_BIASES], lower_bound);
    }
}

// Computes this block's low-rank gates of tokens first .. first + CHUNK - 1 and hands them to whoever needs them.
__device__ __forceinline__ void compute_gates(Shared& shared, const GateWeights& w, const GateInputs& input,
                                              int first, float lower_bound, int rank) {
    int group = threadIdx.x / GATE_LANES;
    int lane = threadIdx.x % GATE_LANES;
    int gate = own_gate(0, rank);
    float a = rate_of(w);
#pragma unroll
    for (int t = 0; t < CHUNK; ++t) {
        uint4 low, high;
        if constexpr (STAGED_INPUT) {
            const uint4* row = reinterpret_cast<const uint4*>(shared.f_a[min(first + t, TOKENS - 1)]);
            low = row[lane], high = row[lane + GATE_LANES];
        } else {
            low = input.run[t][0], high = input.run[t][1];
        }
        float sum[GATE_PASSES];
#pragma unroll
        for (int pass = 0; pass < GATE_PASSES; ++pass)
            sum[pass] = __fadd_rn(dot_run(w.f_b[pass][0], low), dot_run(w.f_b[pass][1], high));
        float g = reduce_transposed<GATE_LANES>(sum, lane);
        float decay = decay_of(g, w, a, w.dt_bias[0], lower_bound);
        if (first + t >= TOKENS || (GATE_ROWS < GATE_GROUPS && group >= GATE_ROWS)) continue;
        if constexpr (SHARED_GATE) {
            u32 address = shared_address(&shared.decay[first + t][gate]);
            u32 barrier = shared_address(&shared.gate_barrier);
            for (int block = lane % GATE_COPIES; block < VALUE_SPLIT; block += GATE_COPIES)
                store_remote(block_address(address, block), decay, block_address(barrier, block));
        } else if (lane % GATE_COPIES == 0) {
            shared.decay[first + t][gate] = decay;
        }
    }
}
