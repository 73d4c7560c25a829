// A decode step of a cluster computes the addresses of its inputs ahead of the dependency wait: the compiler
// would leave 90 instructions behind it, on the path to the first load (H200: 2.30 against 2.20 microseconds
// at 1 request, 3.47 against 3.30 at 4). Elsewhere the registers are worth more, and early reads are
// slower for it.
constexpr bool PINNED = SHARED_GATE && TOKENS == 1 && !VERIFY && !EARLY_CACHES;

// Of this thread: in the first slot of a pool, and in the request's row.
struct PinnedInputs {
    const int* slot;
    const bf16_bits *f_a, *beta, *output_gate;
    const bf16_bits *raw[CONV_PASSES], *line[CONV_PASSES];
    const state_element* source;
};

// Has the address computed here, not where it is first used.
template <typename T>
__device__ __forceinline__ T* pin(T* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// load_window of these addresses: one text for both, with the address a parameter, changes the
// registers of every other kernel.
__device__ __forceinline__ void load_pinned_window(ConvInputs& in, const PinnedInputs& own, int slot,
                                                   const KdaGeometry& geometry) {
    i64 line = slot * geometry.conv_slot_stride;
#pragma unroll
    for (int pass = 0; pass < CONV_PASSES; ++pass)
#pragma unroll
        for (int tap = 0; tap < CONV_WIDTH - 1; ++tap)
            in.window[pass][tap] = load_cached_bits(own.line[pass] + line + conv_offset(0, tap, geometry));
}
