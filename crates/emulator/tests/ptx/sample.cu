// Ordinary CUDA, so that the parser meets what NVRTC makes of it: loops, local arrays, tables,
// division, doubles, 64-bit arithmetic, shuffles, atomics, asynchronous copies and, where the
// architecture has them, clusters and asynchronous stores. Compiled by NVRTC 13.0 with
// --std=c++17 -fmad=false for each architecture beside this file.
typedef unsigned int u32;
typedef unsigned long long u64;

struct Arguments {
    const float* in;
    float* out;
    u32* counter;
    int count;
    short bias;
};

__constant__ int TABLE[8] = {3, 1, 4, 1, 5, 9, 2, 6};

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

extern "C" __global__ void __launch_bounds__(64)
#if __CUDA_ARCH__ >= 900
__cluster_dims__(2, 1, 1)
#endif
sample(const Arguments arguments, int rounds) {
    __shared__ alignas(16) float tile[64];
    __shared__ float partial[2];
    __shared__ u64 barrier;
    extern __shared__ float scratch[];
    const int thread = threadIdx.x;
    const int index = blockIdx.x * 64 + thread;

    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(tile + thread)), "l"(arguments.in + index));
    asm volatile("cp.async.commit_group;");
#if __CUDA_ARCH__ >= 900
    if (thread == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&barrier)) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8;" ::"r"(address(&barrier)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    // An array that the compiler cannot keep in registers.
    float local[8];
    for (int i = 0; i < 8; ++i) local[i] = tile[(thread + i) & 63];
    float sum = 0.0f;
    for (int i = 0; i < rounds; ++i) sum += local[TABLE[i & 7] & 7] * (float)(i + 1);
    switch (thread & 3) {
        case 0: sum += 1.0f; break;
        case 1: sum *= 2.0f; break;
        case 2: sum = sum / 3.0f; break;
        default: sum = sqrtf(fabsf(sum)); break;
    }
    double precise = (double)sum * 1.5 + (double)(index % 7);
    long long wide = (long long)index * 0x100000001ll / (arguments.count + 1) % 1000;
    scratch[thread] = (float)precise + (float)wide + (float)arguments.bias;

    float total = scratch[thread];
    for (int offset = 16; offset >= 1; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
    if (__any_sync(0xffffffffu, thread == 33)) atomicAdd(arguments.counter, 1u);
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    // Each block sends the total of its second warp to both blocks.
    if (thread >= 32 && thread < 34) {
        u32 to, at;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(partial + blockIdx.x % 2)), "r"(thread - 32));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(address(&barrier)), "r"(thread - 32));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                     "r"(__float_as_uint(total)), "r"(at)
                     : "memory");
    }
    u32 done = 0;
    while (!done)
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(address(&barrier)), "r"(0)
            : "memory");
    float both = partial[0] + partial[1];
#else
    if (thread == 32) partial[0] = total;
    __syncthreads();
    float both = partial[0];
#endif
    arguments.out[index] = scratch[thread] + both * 0.0625f;
}
