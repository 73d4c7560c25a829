// Which slots a request reads and writes, and whether it is live. Values come from device memory
// the host never sees, so every one is checked before it becomes an address.
enum FaultKind : u32 { FAULT_NONE = 0, FAULT_SLOT = 1, FAULT_ACCEPTED = 2, FAULT_NULL_SOURCE = 3, FAULT_TOKENS = 4 };

struct FaultRecord {
    u64 first;  // request << 32 | kind of the lowest faulted request; all ones: none
    u32 count;
    u32 reserved;
};

__device__ __forceinline__ bool is_null(int slot) { return NULL_NON_POSITIVE ? slot <= 0 : slot < 0; }

// Heads of one request that blocks take in turn before those of the next request: with all of many
// heads, F_B has left L2 before it is wanted again.
__device__ constexpr int head_group() {
    int heads = HEADS < 12 || VALUE_SPLIT > 1 ? HEADS : 12;
    while (HEADS % heads != 0) --heads;
    return heads;
}

// The (request, head) pair of this block, and its number in the order in which blocks start.
struct Pair {
    int number, request, head;
};

__device__ __forceinline__ Pair own_pair() {
    constexpr u32 GROUP = head_group();
    u32 head = blockIdx.x / VALUE_SPLIT, request = blockIdx.y;
    int number = request * HEADS + head;
    if constexpr (GROUP < HEADS) {
        u32 row = number / GROUP;
        head = row / gridDim.y * GROUP + number % GROUP;
        request = row % gridDim.y;
    }
    return {number, (int)request, (int)head};
}

// About how many (request, head) pairs are resident at once.
__device__ __forceinline__ int first_wave() {
    u32 multiprocessors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    return multiprocessors * MIN_BLOCKS / VALUE_SPLIT;
}

// As loaded: nothing has been looked at yet.
struct SlotValues {
    int own;       // lane l holds column l, or the last one
    int accepted;
    int tokens;
};

struct RequestSlots {
    int own;           // lane t holds the checkpoint slot of token t
    int window;        // slot of the conv line: column 0
    int source;        // slot of the state to start from
    int window_start;  // first tap in the conv line, and number of records to repeat: accepted - 1
    int tokens;        // that the request brings, or rows to clear where it is not live
    u32 fault;
    bool live;
};

// threadIdx.y is 0, but not for the compiler: it would move a slot that it knows to be uniform to a
// uniform register at once, and wait for it ahead of every load after it.
__device__ __forceinline__ SlotValues load_slots(const int* row, const int* accepted,
                                                 const int* token_counts, int lane, const KdaGeometry& geometry) {
    SlotValues values;
    values.own = load_int(row + (VERIFY && !RECORDS ? min(lane, geometry.columns - 1) : 0) + threadIdx.y);
    values.accepted = VERIFY ? load_int(accepted + threadIdx.y) : 1;
    values.tokens = RAGGED ? load_int(token_counts + threadIdx.y) : TOKENS;
    return values;
}

__device__ __forceinline__ bool in_pool(int slot, const KdaGeometry& geometry) {
    return !is_null(slot) && slot < geometry.pool_slots;
}

// What hints bring into L2 beside the state. Where more blocks work on more heads the rest is in the way
// (H200: windows of wide checkpoint steps, 16 requests of 2 tokens, 13.0 against 13.3 microseconds;
// records, 16 requests of 4, 13.0 against 14.1).
constexpr bool HINTED_WINDOW = TOKENS == 1 || RECORDS || VALUE_SPLIT > 1;
constexpr bool HINTED_RECORDS = RECORDS && VALUE_SPLIT == 8 && TOKENS <= 8;

// Slots as they stand ahead of the dependency wait, unchecked.
struct HintedSlots {
    int window, source;
    int start;  // first tap in the conv line, and number of records to repeat
};

__device__ __forceinline__ HintedSlots load_hinted_slots(const int* row, const int* accepted, int lane,
                                                         const KdaGeometry& geometry) {
    if constexpr (!VERIFY || (RECORDS && !HINTED_RECORDS)) {
        int slot = load_int(row);
        return {slot, slot, 0};
    }
    // Lanes past the last column hold it: any count leads to one.
    int own = load_int(row + (RECORDS ? 0 : min(lane, geometry.columns - 1)));
    int last = min(max(load_int(accepted), 1), min(geometry.columns, 32)) - 1;
    int window = __shfl_sync(FULL_WARP, own, 0);
    if constexpr (RECORDS) return {window, window, last};
    return {window, __shfl_sync(FULL_WARP, own, last), 0};
}

// What the request does. Waits for the values.
__device__ __forceinline__ RequestSlots resolve_slots(const SlotValues& values, const int* row, int lane,
                                                      const KdaGeometry& geometry) {
    RequestSlots r;
    r.own = values.own;
    r.tokens = TOKENS;
    if constexpr (!VERIFY) {
        r.own = r.window = r.source = uniform(values.own);
        r.window_start = 0;
        r.fault = !is_null(r.window) && r.window >= geometry.pool_slots ? FAULT_SLOT : FAULT_NONE;
    } else {
        int count = uniform(values.accepted);
        int tokens = RAGGED ? uniform(values.tokens) : TOKENS;
        bool fits = tokens >= 0 && tokens <= TOKENS;
        if (fits) r.tokens = tokens;
        r.window = uniform(__shfl_sync(FULL_WARP, values.own, 0));
        bool counted = count >= 1 && count <= geometry.columns;
        r.window_start = counted ? count - 1 : 0;
        // A warp holds the first 32 columns. With records the state is in column 0, whatever was accepted.
        if constexpr (RECORDS) r.source = r.window;
        else r.source = uniform(r.window_start < 32 ? __shfl_sync(FULL_WARP, values.own, r.window_start)
                                                    : load_int(row + r.window_start));
        bool outside = __any_sync(FULL_WARP, lane < r.tokens && r.own >= geometry.pool_slots);
        r.fault = FAULT_NONE;
        if (!is_null(r.window) && r.tokens > 0) {
            if (!fits) r.fault = FAULT_TOKENS;
            else if (outside) r.fault = FAULT_SLOT;
            else if (!counted) r.fault = FAULT_ACCEPTED;
            else if (is_null(r.source)) r.fault = FAULT_NULL_SOURCE;
            else if (r.source >= geometry.pool_slots) r.fault = FAULT_SLOT;
        }
    }
    r.live = !is_null(r.window) && r.fault == FAULT_NONE && r.tokens > 0;
    return r;
}

// One block of each request reports.
__device__ __forceinline__ bool reports(int head) { return VALUE_SPLIT > 1 ? blockIdx.x == 0 : head == 0; }

__device__ __forceinline__ void report_fault(FaultRecord* faults, int request, u32 kind) {
    atomicAdd(&faults->count, 1u);
    atomicMin(&faults->first, (u64)request << 32 | kind);
}
