// Dependent launch, cluster barriers, transaction barriers, stores into other blocks. No model terms.
__device__ __forceinline__ void dependency_wait() {
    if constexpr (DEPENDENT_LAUNCH) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        // The next kernel's prologue overlaps this one; it waits for our end before it reads.
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
}

// Relaxed: a release here would be a fence over the whole GPU. What the barrier must publish, the
// mbarrier inits, is published by fence.mbarrier_init.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ u32 block_address(u32 address, int rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// One arrival (the caller's own) and `bytes` of asynchronous stores complete the only phase used.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Acquire over the cluster: what other blocks did before their stores is visible afterwards.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Stores one f32 into a block of the cluster and counts its 4 bytes on that block's barrier.
__device__ __forceinline__ void store_remote(u32 address, float value, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     address),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}
