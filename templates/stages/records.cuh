// A verify step that keeps one state, and of every later token a record of what the delta rule did:
// decay[128], k[128] (normalised), u[128], all f32. The next step repeats the accepted ones,
//   S <- S decay;  S <- S + u k,
// on the state it reads: the operations that made the checkpoint, in their order, so the same bits.
constexpr int RECORD_SIZE = 3 * HEAD_DIM;

__device__ __forceinline__ i64 record_offset(int index, int head) {
    return ((i64)index * HEADS + head) * RECORD_SIZE;
}

// Starts copying records first .. first + RECORD_CHUNK - 1 that are below `count`. All blocks read
// decay and k, each its own rows of u.
__device__ __forceinline__ void stage_records(Shared& shared, const float* slot, int first, int count, int head,
                                              int rank) {
    constexpr int PIECES = RECORD_FLOATS / 4;
    for (int i = threadIdx.x; i < min(count - first, RECORD_CHUNK) * PIECES; i += THREADS) {
        int index = i / PIECES, column = i % PIECES * 4;
        const float* record = slot + record_offset(first + index, head);
        copy_to_shared16(shared_address(&shared.records[index][column]),
                         record + column + (column < 2 * HEAD_DIM ? 0 : rank * ROWS));
    }
}

__device__ __forceinline__ void prefetch_records(const float* slot, int count, int head, int rank) {
    constexpr int LINES = (RECORD_FLOATS + 31) / 32;
    for (int i = threadIdx.x; i < count * LINES; i += THREADS) {
        int column = i % LINES * 32;
        prefetch_l2(slot + record_offset(i / LINES, head) + column + (column < 2 * HEAD_DIM ? 0 : rank * ROWS));
    }
}

// Repeats the staged records from `first` on.
__device__ __forceinline__ void repeat_records(RowState& state, const Shared& shared, int first, int count) {
#pragma unroll 1
    for (int index = 0; index < min(count - first, RECORD_CHUNK); ++index) {
        const float* record = shared.records[index];
        float4 decay[VECTORS], k[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            decay[j] = load_shared4(record, j);
            k[j] = load_shared4(record + HEAD_DIM, j);
        }
#pragma unroll
        for (int i = 0; i < GROUP_ROWS; ++i) {
            float u = record[2 * HEAD_DIM + group_row(i)];
#pragma unroll
            for (int j = 0; j < VECTORS; ++j)
                state.s[i][j] = round_state4((const state_element*)nullptr,
                                             fma4(u, k[j], multiply4(state.s[i][j], decay[j])));
        }
    }
}

// u of the own row. Nobody else reads it, and it has been repeated by now.
__device__ __forceinline__ void store_record_update(float* slot, int token, float update, int head, int rank) {
    if (threadIdx.x % ROW_COPIES == 0)
        store_float(slot + record_offset(token - 1, head) + 2 * HEAD_DIM + rank * ROWS + own_row(), update);
}

// decay and k of the keys with the index of this block's rows. Every block of the cluster has read
// the old ones by now: the norm exchange orders it.
__device__ __forceinline__ void store_record_keys(const Shared& shared, float* slot, int tokens, int head, int rank) {
    for (int i = threadIdx.x; i < (tokens - 1) * ROWS; i += THREADS) {
        int token = 1 + i / ROWS, key = rank * ROWS + i % ROWS;
        float* record = slot + record_offset(token - 1, head) + key;
        store_float(record, shared.decay[token][key]);
        store_float(record + HEAD_DIM, shared.qkv[token][HEAD_DIM + key]);
    }
}
