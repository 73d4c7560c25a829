// Global memory: loads that keep their place, stores, prefetch. No model terms.
// `asm volatile` keeps ptxas' input in program order, and `ld.volatile` keeps ptxas from sinking a
// load behind a branch on another load: each costs a memory latency. Such a load bypasses L1.
__device__ __forceinline__ bf16_bits load_bits(const bf16_bits* address) {
    bf16_bits bits;
    asm volatile("ld.volatile.global.b16 %0, [%1];" : "=h"(bits) : "l"(address));
    return bits;
}

// For neighbours that several loads share: L1 serves all but the first.
__device__ __forceinline__ bf16_bits load_cached_bits(const bf16_bits* address) {
    bf16_bits bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(address));
    return bits;
}

// Inputs of the step. Hiding their latency matters where a cluster works on one head; L1 where a
// block has a head to itself.
constexpr bool LATENCY_BOUND = SHARED_GATE || (PROJECTED_GATE && VALUE_SPLIT > 1);

__device__ __forceinline__ bf16_bits load_input(const bf16_bits* address) {
    return LATENCY_BOUND ? load_bits(address) : load_cached_bits(address);
}

// Four bf16 values at 8-byte alignment.
__device__ __forceinline__ uint2 load_bits4(const bf16_bits* address) {
    uint2 value;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
    return value;
}

__device__ __forceinline__ int load_int(const int* address) {
    int value;
    asm volatile("ld.volatile.global.b32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
}

__device__ __forceinline__ float load_weight(const float* address) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
    return value;
}

// Eight bf16 weights; 16-byte aligned.
__device__ __forceinline__ uint4 load_weights8(const bf16_bits* address) {
    uint4 value;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// Where every multiprocessor works on heads of its own, state stays in L2 until it is written back:
// 1 to 3 percent from 128 requests up. Clusters, verify steps and early reads are slower for it; a
// bf16 pool was not measured and goes without.
constexpr bool KEEP_STATE = VALUE_SPLIT == 1 && TOKENS == 1 && !EARLY_CACHES;

__device__ __forceinline__ u64 evict_last_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    return policy;
}

// Four consecutive state elements as f32. State passes through once: it does not displace L1.
__device__ __forceinline__ float4 load_state4(const float* address) {
    float4 value;
    if constexpr (KEEP_STATE) {
        asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                     : "l"(address), "l"(evict_last_policy()));
    } else {
        asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                     : "l"(address));
    }
    return value;
}

__device__ __forceinline__ float4 load_state4(const bf16_bits* address) {
    uint2 pair;
    asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                 : "=r"(pair.x), "=r"(pair.y)
                 : "l"(address));
    return make_float4(widen_low(pair.x), widen_high(pair.x), widen_low(pair.y), widen_high(pair.y));
}

// As it would be read back from a pool of this element type.
__device__ __forceinline__ float4 round_state4(const float*, float4 value) { return value; }
__device__ __forceinline__ float4 round_state4(const bf16_bits*, float4 value) {
    u32 low = round_bf16_pair(value.x, value.y);
    u32 high = round_bf16_pair(value.z, value.w);
    return make_float4(widen_low(low), widen_high(low), widen_low(high), widen_high(high));
}

// Stores `value`, and returns it as it will be read back.
__device__ __forceinline__ float4 store_state4(float* address, float4 value, bool enabled) {
    if (enabled) {
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value.x),
                     "f"(value.y), "f"(value.z), "f"(value.w)
                     : "memory");
    }
    return value;
}

__device__ __forceinline__ float4 store_state4(bf16_bits* address, float4 value, bool enabled) {
    u32 low = round_bf16_pair(value.x, value.y);
    u32 high = round_bf16_pair(value.z, value.w);
    if (enabled) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(low), "r"(high) : "memory");
    }
    return make_float4(widen_low(low), widen_high(low), widen_low(high), widen_high(high));
}

__device__ __forceinline__ void store_float(float* address, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// 16 bytes to shared memory, which are there after wait_copies.
__device__ __forceinline__ void copy_to_shared16(u32 shared, const float* address) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(address) : "memory");
}

// This thread's copies are there; a block barrier shows them to the others.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_bits(bf16_bits* address, bf16_bits bits) {
    asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(bits) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
