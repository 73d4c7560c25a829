// Which slots a request reads and writes, and whether it is live. Values come from device memory
// the host never sees, so every one is checked before it becomes an address.
enum FaultKind : u32 { FAULT_NONE = 0, FAULT_SLOT = 1, FAULT_ACCEPTED = 2, FAULT_NULL_SOURCE = 3 };

struct FaultRecord {
    u64 first;  // request << 32 | kind of the lowest faulted request; all ones: none
    u32 count;
    u32 reserved;
};

__device__ __forceinline__ bool is_null(int slot) { return NULL_NON_POSITIVE ? slot <= 0 : slot < 0; }

struct RequestSlots {
    int own;           // lane t holds the checkpoint slot of token t
    int window;        // slot of the conv line: column 0
    int source;        // slot of the state to start from
    int window_start;  // first tap in the conv line: accepted - 1
    u32 fault;
    bool live;
};

__device__ __forceinline__ RequestSlots load_slots(const int* slots, const int* accepted, int request,
                                                   int lane, const KdaGeometry& geometry) {
    RequestSlots r;
    const int* row = slots + (i64)request * geometry.slots_stride;
    if constexpr (TOKENS == 1 && !VERIFY) {
        r.own = r.window = r.source = load_int(row);
        r.window_start = 0;
        bool null = is_null(r.window);
        r.fault = !null && r.window >= geometry.pool_slots ? FAULT_SLOT : FAULT_NONE;
        r.live = !null && r.fault == FAULT_NONE;
    } else {
        int count = load_int(accepted + request);
        r.own = load_int(row + min(lane, TOKENS - 1));
        r.window = __shfl_sync(FULL_WARP, r.own, 0);
        bool null = is_null(r.window);
        bool counted = count >= 1 && count <= geometry.columns;
        r.source = load_int(row + (counted ? count - 1 : 0));
        r.window_start = counted ? count - 1 : 0;
        bool outside = __any_sync(FULL_WARP, r.own >= geometry.pool_slots);
        r.fault = FAULT_NONE;
        if (!null) {
            if (outside) r.fault = FAULT_SLOT;
            else if (!counted) r.fault = FAULT_ACCEPTED;
            else if (is_null(r.source)) r.fault = FAULT_NULL_SOURCE;
            else if (r.source >= geometry.pool_slots) r.fault = FAULT_SLOT;
        }
        r.live = !null && r.fault == FAULT_NONE;
    }
    return r;
}

__device__ __forceinline__ void report_fault(FaultRecord* faults, int request, u32 kind) {
    atomicAdd(&faults->count, 1u);
    atomicMin(&faults->first, (u64)request << 32 | kind);
}
