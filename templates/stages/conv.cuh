// y = SiLU(bias + sum_w weight[w] tap[w]) over the last four raw inputs, and the new conv line.
// Each block computes all q and k channels of its head and the v channels of its own rows, and
// writes back the q, k and v channels that have its rows' index.
constexpr int HEAD_DIM = 128;
constexpr int DIM = HEADS * HEAD_DIM;
constexpr int CONV_WIDTH = 4;
constexpr int ROWS = HEAD_DIM / VALUE_SPLIT;       // value rows of this block
constexpr int CHANNELS = 2 * HEAD_DIM + ROWS;      // conv channels of this block
constexpr int CONV_PASSES = (CHANNELS + THREADS - 1) / THREADS;

static_assert(CHANNELS == QKV_CHANNELS, "shared q, k, v hold the channels of a block");

struct ConvChannel {
    int part;    // 0 q, 1 k, 2 v
    int in_head; // channel within the head
};

// Channel of index `i` in this block; indexes past the end repeat the last one.
__device__ __forceinline__ ConvChannel conv_channel(int i, int rank) {
    i = min(i, CHANNELS - 1);
    int part = min(i / HEAD_DIM, 2);
    int offset = i - part * HEAD_DIM;
    return {part, part == 2 ? rank * ROWS + offset : offset};
}

struct ConvWeights {
    float tap[CONV_PASSES][CONV_WIDTH];
    float bias[CONV_PASSES];
};

__device__ __forceinline__ void load_conv_weights(ConvWeights& w, const float* weight, const float* bias,
                                                  int head, int rank) {
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass) {
        ConvChannel c = conv_channel(pass * THREADS + threadIdx.x, rank);
        int channel = head * HEAD_DIM + c.in_head;
#pragma unroll
        for (int tap = 0; tap < CONV_WIDTH; ++tap)
            w.tap[pass][tap] = load_weight(weight + (c.part * CONV_WIDTH + tap) * DIM + channel);
        if constexpr (CONV_BIAS) w.bias[pass] = load_weight(bias + c.part * DIM + channel);
    }
}

// In a cluster the blocks read each other's part of the window: the new line waits for the norm
// exchange. A block alone writes it at once, each channel being one thread's from first read to
// last write; but a decode step that reads early is faster with the late line.
constexpr bool LATE_LINE = VALUE_SPLIT > 1 || (TOKENS == 1 && EARLY_CACHES);

// Whether the new line's values stay in registers until it is written; else they are loaded again,
// which costs a latency and spares registers.
constexpr bool KEEP_LINE = LATENCY_BOUND && TOKENS <= CHUNK;

struct ConvInputs {
    bf16_bits window[CONV_PASSES][CONV_WIDTH - 1];  // the three inputs before `raw`
    bf16_bits opening[CONV_PASSES][CONV_WIDTH - 2]; // the two that open the new line
    bf16_bits raw[CONV_PASSES][CHUNK];
};

__device__ __forceinline__ i64 conv_offset(int column, int position, const KdaGeometry& geometry) {
    return CONV_TOKEN_FIRST ? (i64)position * (3 * DIM) + column
                            : (i64)column * geometry.conv_length + position;
}

__device__ __forceinline__ void load_window(ConvInputs& in, const bf16_bits* line, int start, int head,
                                            int rank, const KdaGeometry& geometry) {
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass) {
        ConvChannel c = conv_channel(pass * THREADS + threadIdx.x, rank);
        int column = c.part * DIM + head * HEAD_DIM + c.in_head;
#pragma unroll
        for (int tap = 0; tap < CONV_WIDTH - 1; ++tap) {
            // With an early line no second thread may read a channel.
            bool wanted = LATE_LINE || pass * THREADS + threadIdx.x < CHANNELS;
            in.window[pass][tap] = wanted ? load_cached_bits(line + conv_offset(column, start + tap, geometry)) : 0;
        }
    }
}

// Of lanes whose addresses lie `stride` elements apart, the first of each 128 bytes: one prefetch each.
__device__ __forceinline__ bool first_of_line(const bf16_bits* address, i64 stride) {
    u64 here = (u64)address, before = (u64)(address - stride);
    return threadIdx.x % 32 == 0 || here / 128 != before / 128;
}

__device__ __forceinline__ void prefetch_window(const bf16_bits* line, int start, int head, int rank,
                                                const KdaGeometry& geometry) {
    constexpr int TAPS = CONV_TOKEN_FIRST ? CONV_WIDTH - 1 : 1;  // else a channel's taps are together
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass) {
        int i = pass * THREADS + threadIdx.x;
        ConvChannel c = conv_channel(i, rank);
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            const bf16_bits* address = line + conv_offset(c.part * DIM + head * HEAD_DIM + c.in_head, start + tap, geometry);
            if (i < CHANNELS && first_of_line(address, conv_offset(1, 0, geometry))) prefetch_l2(address);
        }
    }
}

// Raw inputs of tokens first .. first + CHUNK - 1; those past the last repeat it.
__device__ __forceinline__ void load_raw(ConvInputs& in, const bf16_bits* qkv, int first, int head, int rank,
                                         i64 pitch) {
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass) {
        ConvChannel c = conv_channel(pass * THREADS + threadIdx.x, rank);
        const bf16_bits* column = qkv + c.part * DIM + head * HEAD_DIM + c.in_head;
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) in.raw[pass][t] = load_input(column + min(first + t, TOKENS - 1) * pitch);
    }
}

__device__ __forceinline__ float silu(float y) { return __fmul_rn(y, sigmoid_fast(y)); }

// Fills shared q, k, v of tokens first .. first + CHUNK - 1 and moves the window past them. The line
// takes those of the request's `tokens`.
__device__ __forceinline__ void convolve(Shared& shared, ConvInputs& in, const ConvWeights& w, int first,
                                         int tokens, bf16_bits* line, int head, int rank, const KdaGeometry& geometry) {
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass) {
        int i = pass * THREADS + threadIdx.x;
        float tap[CHUNK + CONV_WIDTH - 1];
#pragma unroll
        for (int n = 0; n < CONV_WIDTH - 1; ++n) {
            tap[n] = widen(in.window[pass][n]);
            if (LATE_LINE && KEEP_LINE && n >= 1) in.opening[pass][n - 1] = in.window[pass][n];
        }
        if constexpr (!LATE_LINE) {
            ConvChannel c = conv_channel(i, rank);
            int column = c.part * DIM + head * HEAD_DIM + c.in_head;
#pragma unroll
            for (int n = 1; n < CONV_WIDTH - 1; ++n)
                if (i < CHANNELS && first == 0) store_bits(line + conv_offset(column, n - 1, geometry), in.window[pass][n]);
#pragma unroll
            for (int t = 0; t < CHUNK; ++t)
                if (i < CHANNELS && first + t < tokens)
                    store_bits(line + conv_offset(column, CONV_WIDTH - 2 + first + t, geometry), in.raw[pass][t]);
        }
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) tap[CONV_WIDTH - 1 + t] = widen(in.raw[pass][t]);
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            float y = CONV_BIAS ? __fmaf_rn(w.tap[pass][0], tap[t], w.bias[pass])
                                : __fmul_rn(w.tap[pass][0], tap[t]);
#pragma unroll
            for (int n = 1; n < CONV_WIDTH; ++n) y = __fmaf_rn(w.tap[pass][n], tap[t + n], y);
            y = silu(y);
            if (i < CHANNELS && first + t < TOKENS) shared.qkv[first + t][i] = y;
        }
#pragma unroll
        for (int n = 0; n < CONV_WIDTH - 1; ++n)
            in.window[pass][n] = n + CHUNK < CONV_WIDTH - 1 ? in.window[pass][n + CHUNK]
                                                            : in.raw[pass][n + CHUNK - CONV_WIDTH + 1];
    }
}

// Writes the new line of the channels whose index within the head is one of this block's rows:
// two taps of the window, then the raw inputs of the request's `tokens`. Every block of the cluster has read its window by
// now: the norm exchange orders it.
__device__ __forceinline__ void store_line(const ConvInputs& in, const bf16_bits* qkv, i64 pitch, bf16_bits* line,
                                           int start, int tokens, int head, int rank,
                                           const KdaGeometry& geometry) {
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass) {
        int i = pass * THREADS + threadIdx.x;
        ConvChannel c = conv_channel(i, rank);
        int row = c.in_head - rank * ROWS;
        if (i >= CHANNELS || row < 0 || row >= ROWS) continue;
        int column = c.part * DIM + head * HEAD_DIM + c.in_head;
        bf16_bits value[TOKENS + CONV_WIDTH - 2];
#pragma unroll
        for (int n = 0; n < TOKENS + CONV_WIDTH - 2; ++n) {
            int t = n - (CONV_WIDTH - 2);
            if constexpr (KEEP_LINE) value[n] = t < 0 ? in.opening[pass][n] : in.raw[pass][t];
            else value[n] = load_cached_bits(t < 0 ? line + conv_offset(column, start + 1 + n, geometry)
                                                   : qkv + column + t * pitch);
        }
        // Every load comes before the first store: the line may overlap its window.
#pragma unroll
        for (int n = 0; n < TOKENS + CONV_WIDTH - 2; ++n)
            if (n < tokens + CONV_WIDTH - 2) store_bits(line + conv_offset(column, n, geometry), value[n]);
    }
}
