// Shared memory of one block. Sizes are in the constants; `Shared` is the whole of it.
constexpr int NORM_GROUP = 4;                 // rows whose squares one partial sum covers
constexpr int NORM_PARTIALS = 128 / NORM_GROUP;
constexpr int QKV_CHANNELS = 2 * 128 + 128 / VALUE_SPLIT;

// Records of one head that are staged at once: as many as 16 tokens leave room for in 48 KiB.
constexpr int RECORD_CHUNK = 8;
constexpr int RECORD_FLOATS = 2 * 128 + 128 / VALUE_SPLIT;  // decay, k, and u of this block's rows

struct Shared {
    // SiLU(conv) of the channels this block computes: q, k, v of its rows. Verify steps normalise q and
    // k in place; the place of v takes the outputs, before the norm.
    alignas(16) float qkv[TOKENS][QKV_CHANNELS];
    alignas(16) float decay[TOKENS][128];
    alignas(16) float partial[TOKENS][NORM_PARTIALS];  // sums of squares of four outputs each
    alignas(16) bf16_bits f_a[STAGED_INPUT ? TOKENS : 1][128];
    alignas(16) float records[RECORDS ? RECORD_CHUNK : 1][RECORDS ? RECORD_FLOATS : 4];
    float kq[TOKENS];                                  // k q, both normalised; verify steps
    u64 gate_barrier;
    u64 norm_barrier;

    __device__ __forceinline__ float* q(int token) { return qkv[token]; }
    __device__ __forceinline__ float* k(int token) { return qkv[token] + 128; }
    __device__ __forceinline__ float* v(int token) { return qkv[token] + 256; }
};
