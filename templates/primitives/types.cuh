// bf16 conversion and exact f32 arithmetic. No model terms.
__device__ __forceinline__ float widen(bf16_bits bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ float widen_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ bf16_bits round_bf16(float value) {
    bf16_bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Low half holds `low`, as two adjacent elements in memory do.
__device__ __forceinline__ u32 round_bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Dot product of four, in the one order every schedule uses.
__device__ __forceinline__ float dot4(float4 a, float4 b) {
    float sum = __fmul_rn(a.x, b.x);
    sum = __fmaf_rn(a.y, b.y, sum);
    sum = __fmaf_rn(a.z, b.z, sum);
    return __fmaf_rn(a.w, b.w, sum);
}

__device__ __forceinline__ float4 scale4(float4 a, float b) {
    return make_float4(__fmul_rn(a.x, b), __fmul_rn(a.y, b), __fmul_rn(a.z, b), __fmul_rn(a.w, b));
}

__device__ __forceinline__ float4 multiply4(float4 a, float4 b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}

// a * b + c with one factor for all four.
__device__ __forceinline__ float4 fma4(float a, float4 b, float4 c) {
    return make_float4(__fmaf_rn(a, b.x, c.x), __fmaf_rn(a, b.y, c.y), __fmaf_rn(a, b.z, c.z),
                       __fmaf_rn(a, b.w, c.w));
}
