// Shared memory of one block. Sizes are in the constants; `Shared` is the whole of it.
constexpr int NORM_GROUP = 4;                 // rows whose squares one partial sum covers
constexpr int NORM_PARTIALS = 128 / NORM_GROUP;

struct Shared {
    alignas(16) float q[TOKENS][128];         // SiLU(conv), not yet normalised
    alignas(16) float k[TOKENS][128];
    alignas(16) float decay[TOKENS][128];
    alignas(16) float partial[TOKENS][NORM_PARTIALS];  // sums of squares of four outputs each
    alignas(16) float v[TOKENS][128 / VALUE_SPLIT];    // then the outputs, before the norm
    u64 gate_barrier;
    u64 norm_barrier;
    bf16_bits line[3 * 128 / VALUE_SPLIT * (TOKENS + 2)];  // new conv line of the channels written here
};
