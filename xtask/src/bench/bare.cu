// The benchmark's own kernels. They bound or surround the step and compute nothing of it. Every
// parameter has 64 bits.
typedef unsigned int u32;
typedef unsigned long long u64;

// As the step does: the kernel ahead has finished behind it, the next one's start overlaps this one.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A load that keeps its place and does not displace L1.
__device__ __forceinline__ uint4 stream4(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

extern "C" __global__ void empty() { dependency_wait(); }

// The state traffic of a step: block (head, request) reads a tile of 16 or 8 parts of 4 KiB and writes
// one for each token. Each instruction of a warp moves 512 contiguous bytes.
template <int PARTS>
__device__ __forceinline__ void pass(uint4* pool, u64 slot_bytes, const int* slots, u64 slots_stride,
                                     const int* accepted, u64 tokens) {
    dependency_wait();
    const int* row = slots + blockIdx.y * slots_stride;
    const u64 first = accepted ? accepted[blockIdx.y] - 1 : 0;
    const u64 place = blockIdx.x * (PARTS * 256) + threadIdx.x;
    const uint4* from = pool + row[first] * (slot_bytes / 16) + place;
    uint4 tile[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) tile[i] = stream4(from + i * 256);
#pragma unroll 1
    for (u64 t = 0; t < tokens; ++t) {
        uint4* to = pool + row[t] * (slot_bytes / 16) + place;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            tile[i].x ^= 1;
            to[i * 256] = tile[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    in_place(uint4* pool, u64 slot_bytes, const int* slots, u64 slots_stride, const int* accepted, u64 tokens) {
    pass<16>(pool, slot_bytes, slots, slots_stride, accepted, tokens);
}

extern "C" __global__ void __launch_bounds__(256)
    in_place_bf16(uint4* pool, u64 slot_bytes, const int* slots, u64 slots_stride, const int* accepted, u64 tokens) {
    pass<8>(pool, slot_bytes, slots, slots_stride, accepted, tokens);
}

// Reads every byte. A store depends on the values, or the loads would be dropped.
extern "C" __global__ void __launch_bounds__(512) read(const uint4* base, u64 bytes, u32* sink) {
    u32 all = 0;
#pragma unroll 4
    for (u64 i = blockIdx.x * 512 + threadIdx.x; i < bytes / 16; i += gridDim.x * 512) {
        uint4 value = base[i];
        all ^= value.x ^ value.y ^ value.z ^ value.w;
    }
    if (all == 0x5eed5eedu) *sink = all;
}

// bf16 values of either sign in 1/128..1/64, the same for one index everywhere.
extern "C" __global__ void __launch_bounds__(512) fill(u32* base, u64 words) {
    for (u64 i = blockIdx.x * 512 + threadIdx.x; i < words; i += gridDim.x * 512) {
        u32 hash = (u32)i * 0x9e3779b1u;
        hash ^= hash >> 15;
        hash *= 0x85ebca6bu;
        hash ^= hash >> 13;
        base[i] = (hash & 0x807f807fu) | 0x3c003c00u;
    }
}

__device__ __forceinline__ float dot2(u32 a, u32 b, float sum) {
    sum = __fmaf_rn(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
    return __fmaf_rn(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), sum);
}

// The multiplication between layers: one row of bf16 [DEPTH] by a weight [columns, DEPTH], a warp a
// column, as fast as the weight streams.
constexpr int DEPTH = 7168;
constexpr int PIECES = DEPTH / 8 / 32;
constexpr int AHEAD = 7;
static_assert(PIECES % AHEAD == 0, "a warp's loads come in equal groups");

__device__ __forceinline__ void multiply(const uint4* weight, const uint4* input, float* output,
                                         volatile u32* projected, u64 projected_words) {
    const u64 column = blockIdx.x * 4 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const uint4* row = weight + column * (DEPTH / 8) + lane;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; i += AHEAD) {
        uint4 w[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) w[j] = stream4(row + (i + j) * 32);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            uint4 x = input[(i + j) * 32 + lane];
            sum = dot2(w[j].w, x.w, dot2(w[j].z, x.z, dot2(w[j].y, x.y, dot2(w[j].x, x.x, sum))));
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) output[column] = sum;
    // The step's input comes from the kernel ahead, as a projection does: the same values again.
    for (u64 i = blockIdx.x * 128 + threadIdx.x; i < projected_words; i += gridDim.x * 128)
        projected[i] = projected[i];
}

#define GEMV_PARAMETERS \
    const uint4 *weight, const uint4 *input, float *output, volatile u32 *projected, u64 projected_words

// An ordinary kernel: it says nothing to the kernel behind it.
extern "C" __global__ void __launch_bounds__(128) gemv(GEMV_PARAMETERS) {
    multiply(weight, input, output, projected, projected_words);
}

// One that takes part in programmatic launch on both sides.
extern "C" __global__ void __launch_bounds__(128) gemv_programmatic(GEMV_PARAMETERS) {
    dependency_wait();
    multiply(weight, input, output, projected, projected_words);
}
