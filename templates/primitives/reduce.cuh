// Sums over the lanes of a row in one fixed tree: partner 16, 8, 4, 2, 1 over 32 partial sums, of
// which partial i covers elements 4i .. 4i+3. Any number of lanes a row gives the same bits.
constexpr u32 FULL_WARP = 0xffffffffu;

__device__ __forceinline__ float shuffle_xor(float value, int offset) {
    return __shfl_xor_sync(FULL_WARP, value, offset);
}

// The value of a warp whose lanes agree, in a uniform register.
__device__ __forceinline__ int uniform(int value) {
    int same;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(value));
    return same;
}

// The part of the tree inside one lane. Lane l of 8 holds partials l, l+8, l+16, l+24.
__device__ __forceinline__ float lane_tree(const float (&partial)[1]) { return partial[0]; }
__device__ __forceinline__ float lane_tree(const float (&partial)[4]) {
    return __fadd_rn(__fadd_rn(partial[0], partial[2]), __fadd_rn(partial[1], partial[3]));
}

// Sums values by adding the upper half to the lower until one is left.
template <int COUNT, int SIZE>
__device__ __forceinline__ float halving_tree(float (&value)[SIZE]) {
    if constexpr (COUNT == 1) {
        return value[0];
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) value[i] = __fadd_rn(value[i], value[i + COUNT / 2]);
        return halving_tree<COUNT / 2>(value);
    }
}

// Sums one value over LANES neighbouring lanes; every lane gets the sum.
template <int LANES>
__device__ __forceinline__ float reduce_all(float value) {
#pragma unroll
    for (int offset = LANES / 2; offset >= 1; offset /= 2)
        value = __fadd_rn(value, shuffle_xor(value, offset));
    return value;
}

// Sums COUNT values over LANES neighbouring lanes at once, halving the values a lane carries at
// each step. Afterwards lane l of the LANES holds the sum of value l / (LANES / COUNT).
template <int LANES, int COUNT>
__device__ __forceinline__ float reduce_transposed(float (&value)[COUNT], int lane) {
    static_assert(COUNT <= LANES, "more values than lanes to own them");
    int count = COUNT;
#pragma unroll
    for (int offset = LANES / 2; offset >= 1; offset /= 2) {
        if (count > 1) {
            count /= 2;
            bool upper = (lane & offset) != 0;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) {
                if (i < count) {
                    float keep = upper ? value[i + count] : value[i];
                    float send = upper ? value[i] : value[i + count];
                    value[i] = __fadd_rn(keep, shuffle_xor(send, offset));
                }
            }
        } else {
            value[0] = __fadd_rn(value[0], shuffle_xor(value[0], offset));
        }
    }
    return value[0];
}
