// out = o rsqrt(mean(o^2) + eps) norm sigmoid(gate) over a head's 128 values, which the blocks of a
// cluster share. Squares are summed by groups of four consecutive rows (inside a warp), then the
// 32 partial sums by halves: the same tree for every split.
constexpr int OUTPUT_TOKENS = (TOKENS + ROW_COPIES - 1) / ROW_COPIES;  // tokens one lane finishes

// Sum of o^2 over the norm group of the own row, and the group's index within the block.
__device__ __forceinline__ float group_square(float output) {
    constexpr int FIRST = ROW_LANES == 8 ? 8 : ROW_COPIES;  // lanes between neighbouring rows
    float sum = __fmul_rn(output, output);
    sum = __fadd_rn(sum, shuffle_xor(sum, FIRST));
    return __fadd_rn(sum, shuffle_xor(sum, 2 * FIRST));
}

// Lanes of a warp that hold the same group's sum, and this lane's number among them.
constexpr int GROUP_COPIES = ROW_COPIES * NORM_GROUP;
__device__ __forceinline__ int group_copy() {
    int lane = threadIdx.x % 32;
    int row = ROW_LANES == 8 ? lane / 8 : lane / ROW_COPIES % NORM_GROUP;
    return lane % ROW_COPIES + row * ROW_COPIES;
}

__device__ __forceinline__ void send_partial(Shared& shared, int token, float square, int rank) {
    int group = (rank * ROWS + own_row()) / NORM_GROUP;
    if constexpr (VALUE_SPLIT > 1) {
        u32 address = shared_address(&shared.partial[token][group]);
        u32 barrier = shared_address(&shared.norm_barrier);
        for (int block = group_copy(); block < VALUE_SPLIT; block += GROUP_COPIES)
            store_remote(block_address(address, block), square, block_address(barrier, block));
    } else if (group_copy() == 0) {
        shared.partial[token][group] = square;
    }
}

// The same tree, one partial sum a lane.
__device__ __forceinline__ float inverse_norm_by_lanes(const float (&partial)[NORM_PARTIALS], float eps) {
    float sum = reduce_all<32>(partial[threadIdx.x % 32]);
    return rsqrt_accurate(__fmaf_rn(sum, 1.0f / HEAD_DIM, eps));
}

__device__ __forceinline__ float inverse_norm(const float (&partial)[NORM_PARTIALS], float eps) {
    float sum[NORM_PARTIALS];
#pragma unroll
    for (int i = 0; i < NORM_PARTIALS; i += 4) {
        float4 four = *reinterpret_cast<const float4*>(partial + i);
        sum[i] = four.x, sum[i + 1] = four.y, sum[i + 2] = four.z, sum[i + 3] = four.w;
    }
    return rsqrt_accurate(__fmaf_rn(halving_tree<NORM_PARTIALS>(sum), 1.0f / HEAD_DIM, eps));
}
