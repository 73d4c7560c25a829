// The gated delta rule on the rows of state this thread holds.
//   S <- S decay;  u = beta (v - S k);  o = S q + u (k q);  S <- S + u k
// o uses the decayed state and k q, so that both row sums of a token run at once.
constexpr int VECTORS = 32 / ROW_LANES;             // float4 a lane holds of one row
constexpr int ROW_GROUPS = THREADS / ROW_LANES;     // groups of lanes, each on its own rows
constexpr int GROUP_ROWS = ROWS / ROW_GROUPS;       // rows of one group, all in registers
constexpr int ROW_COPIES = ROW_LANES / GROUP_ROWS;  // lanes that end up with the same row's sums
static_assert(ROW_LANES == 8 || ROW_LANES == 32, "the reduction tree fits 8 or 32 lanes a row");
static_assert(GROUP_ROWS >= 1 && GROUP_ROWS * ROW_GROUPS == ROWS, "threads do not divide the rows");
static_assert(GROUP_ROWS <= ROW_LANES, "more rows than lanes to own them");
static_assert(ROW_LANES == 8 || GROUP_ROWS % NORM_GROUP == 0, "a warp holds whole norm groups");

// Row `i` of this thread's group, within the block. A warp's rows of one `i` (8 lanes a row) or all
// its rows (32 lanes a row) are whole norm groups.
__device__ __forceinline__ int group_row(int i) {
    int group = threadIdx.x / ROW_LANES;
    return ROW_LANES == 8 ? i * ROW_GROUPS + group : group * GROUP_ROWS + i;
}

// The row whose sums this lane owns after the transposed reduction.
__device__ __forceinline__ int own_row() { return group_row(threadIdx.x % ROW_LANES / ROW_COPIES); }

struct RowState {
    float4 s[GROUP_ROWS][VECTORS];
};

__device__ __forceinline__ i64 row_offset(int head, int rank, int row) {
    return ((i64)head * HEAD_DIM + rank * ROWS + row) * HEAD_DIM + threadIdx.x % ROW_LANES * 4;
}

// Where this thread's vectors of a slot are: by the row of each, or by their distance from the first,
// which takes fewer instructions where that address is at hand, and more registers where it is not.
struct VectorsByRow {
    const state_element* slot;
    int head, rank;

    __device__ __forceinline__ const state_element* operator()(int i, int j) const {
        return slot + row_offset(head, rank, group_row(i)) + j * ROW_LANES * 4;
    }
};

struct VectorsByDistance {
    const state_element* first;

    __device__ __forceinline__ const state_element* operator()(int i, int j) const {
        return first + (i * (ROW_LANES == 8 ? ROW_GROUPS : 1) * HEAD_DIM + j * ROW_LANES * 4);
    }
};

template <typename Vectors>
__device__ __forceinline__ void load_state(RowState& state, const Vectors& vector) {
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) state.s[i][j] = load_state4(vector(i, j));
}

template <typename Vectors>
__device__ __forceinline__ void prefetch_state(const Vectors& vector) {
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
            if (threadIdx.x % 8 == 0) prefetch_l2(vector(i, j));
}

// A bf16 pool rounds the state itself: the next token reads what this one stored.
__device__ __forceinline__ void store_state(RowState& state, state_element* slot, int head, int rank,
                                            bool enabled) {
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
            state.s[i][j] = store_state4(slot + row_offset(head, rank, group_row(i)) + j * ROW_LANES * 4,
                                         state.s[i][j], enabled);
}

__device__ __forceinline__ int shared4_offset(int j) { return (threadIdx.x % ROW_LANES + j * ROW_LANES) * 4; }

__device__ __forceinline__ float4 load_shared4(const float* vector, int j) {
    return *reinterpret_cast<const float4*>(vector + shared4_offset(j));
}

__device__ __forceinline__ void store_shared4(float* vector, int j, float4 value) {
    *reinterpret_cast<float4*>(vector + shared4_offset(j)) = value;
}

// Sum over the row of a[i] b[i], in every lane.
__device__ __forceinline__ float row_dot(const float4 (&a)[VECTORS], const float4 (&b)[VECTORS]) {
    float partial[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) partial[j] = dot4(a[j], b[j]);
    return reduce_all<ROW_LANES>(lane_tree(partial));
}

// What one token gives a thread.
struct TokenResult {
    float output;  // of the own row
    float update;  // u of the own row
};

// This lane's part of a token's vectors.
struct TokenVectors {
    float4 q[VECTORS], k[VECTORS], decay[VECTORS];
};

// A cluster's decays may still be on their way: WITH_DECAY is for when they are there.
template <bool WITH_DECAY>
__device__ __forceinline__ TokenVectors load_vectors(Shared& shared, int token) {
    TokenVectors x;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        x.q[j] = load_shared4(shared.q(token), j);
        x.k[j] = load_shared4(shared.k(token), j);
        if constexpr (WITH_DECAY) x.decay[j] = load_shared4(shared.decay[token], j);
    }
    return x;
}

// q <- q scale / |q|;  k <- k / |k|
__device__ __forceinline__ void normalise(TokenVectors& x, float scale) {
    float q_factor = __fmul_rn(rsqrt_accurate(__fadd_rn(row_dot(x.q, x.q), 1e-6f)), scale);
    float k_factor = rsqrt_accurate(__fadd_rn(row_dot(x.k, x.k), 1e-6f));
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        x.q[j] = scale4(x.q[j], q_factor);
        x.k[j] = scale4(x.k[j], k_factor);
    }
}

// Normalises q and k of the request's `tokens` in shared memory, a token by each group of lanes: in a
// verify step the barrier behind it costs less than doing so in every warp. All lanes of a warp take part.
__device__ __forceinline__ void normalise_tokens(Shared& shared, int tokens, float scale) {
    constexpr int WARP_TOKENS = 32 / ROW_LANES;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * WARP_TOKENS; first < tokens; first += ROW_GROUPS) {
        int token = first + threadIdx.x % 32 / ROW_LANES;
        TokenVectors x = load_vectors<false>(shared, min(token, tokens - 1));
        normalise(x, scale);
        float kq = row_dot(x.k, x.q);
        // Lanes past the last token have read it before its own lanes write.
        __syncwarp();
        if (token >= tokens) continue;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            store_shared4(shared.q(token), j, x.q[j]);
            store_shared4(shared.k(token), j, x.k[j]);
        }
        if (threadIdx.x % ROW_LANES == 0) shared.kq[token] = kq;
    }
}

// One token on this thread's rows. `v` is the own row's value.
__device__ __forceinline__ TokenResult delta_rule(RowState& state, Shared& shared, int token, float beta,
                                            float v, float scale) {
    constexpr bool LATE_DECAY = SHARED_GATE && TOKENS == 1;
    TokenVectors x = load_vectors<!LATE_DECAY>(shared, token);
    float kq;
    if constexpr (TOKENS == 1) normalise(x, scale);
    if constexpr (LATE_DECAY) {
        // The cluster's gates may take longer than the norms.
        kq = row_dot(x.k, x.q);
        barrier_wait(shared_address(&shared.gate_barrier), 0);
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) x.decay[j] = load_shared4(shared.decay[token], j);
    }
    float sum_k[GROUP_ROWS], sum_q[GROUP_ROWS];
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i) {
        float partial_k[VECTORS], partial_q[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            state.s[i][j] = multiply4(state.s[i][j], x.decay[j]);
            partial_k[j] = dot4(state.s[i][j], x.k[j]);
            partial_q[j] = dot4(state.s[i][j], x.q[j]);
        }
        sum_k[i] = lane_tree(partial_k);
        sum_q[i] = lane_tree(partial_q);
    }
    int lane = threadIdx.x % ROW_LANES;
    float state_k = reduce_transposed<ROW_LANES>(sum_k, lane);
    float state_q = reduce_transposed<ROW_LANES>(sum_q, lane);
    float update = __fmul_rn(beta, __fadd_rn(v, -state_k));
    if constexpr (TOKENS > 1) kq = shared.kq[token];
    else if constexpr (!LATE_DECAY) kq = row_dot(x.k, x.q);
    float output = __fmaf_rn(update, kq, state_q);
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i) {
        float u = GROUP_ROWS == 1 ? update : __shfl_sync(FULL_WARP, update, i * ROW_COPIES, ROW_LANES);
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) state.s[i][j] = fma4(u, x.k[j], state.s[i][j]);
    }
    return {output, update};
}
