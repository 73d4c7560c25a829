// How a specialisation spends its registers: 128 a thread, two blocks of 256 threads on a
// multiprocessor. Nothing spills at up to 16 tokens; up to 8, what is faster of what was timed.
constexpr bool WIDE = 128 / VALUE_SPLIT * 128 / THREADS >= 64;  // a thread holds 64 floats of state

// Beside F_B, a wide step with records, the softplus gate or more than 4 tokens has no room for state or
// inputs: F_A passes through shared memory, and the state is loaded behind the gates.
constexpr bool CROWDED = WIDE && TOKENS > 1 && !PROJECTED_GATE && (RECORDS || !LOWER_BOUND_GATE || TOKENS > 4);
constexpr bool STAGED_INPUT = SHARED_GATE || CROWDED;  // F_A passes through shared memory

// Tokens whose inputs a thread holds at once.
__device__ constexpr int chunk_limit() {
    if (SHARED_GATE) return TOKENS <= 8 ? 8 : 4;
    if (!CROWDED) return 4;
    if (TOKENS > 8) return 1;
    return TOKENS > 4 || (RECORDS && !LOWER_BOUND_GATE) ? 2 : 4;
}
constexpr int CHUNK = TOKENS < chunk_limit() ? TOKENS : chunk_limit();
constexpr bool LATE_STATE = TOKENS > CHUNK || CROWDED;  // state is loaded behind the gates

// Beta and output gate are loaded behind the gates, too.
constexpr bool LATE_GATES = (CROWDED || (SHARED_GATE && TOKENS > 4)) && (!RECORDS || VALUE_SPLIT == 2);

// ptxas moves the state's loads of these steps behind the gates. Where a block has a multiprocessor to
// itself that costs a latency, unless L2 has it by then (H200, 16 requests of 4 tokens: 23.7 against
// 21.1 microseconds).
constexpr bool PREFETCHED_STATE = WIDE && !RECORDS && (TOKENS == 3 || TOKENS == 4);

// Copies of the token loop's body. Rolled, a cluster's checkpoints are faster, too. Of many records 13
// alone spill rolled.
constexpr bool ROLLED = TOKENS > 2 && (RECORDS ? CROWDED && TOKENS > 8 && TOKENS != 13 : SHARED_GATE);
constexpr int UNROLLED_TOKENS = ROLLED ? 1 : TOKENS;
