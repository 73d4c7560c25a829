// Elementary functions with stated error, built on the approximate hardware ones. No model terms.
// NaN in, NaN out: the clamps use the NaN-propagating min and max.
__device__ __forceinline__ float min_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / sqrt(x) for x in [1e-6, inf): one Newton step leaves about one ulp.
__device__ __forceinline__ float rsqrt_accurate(float x) {
    float r = rsqrt_approx(x);
    float e = __fmaf_rn(__fmul_rn(x, r), -r, 1.0f);
    float refined = __fmaf_rn(__fmul_rn(0.5f, e), r, r);
    return x < 3.0e38f ? refined : r;  // inf * 0 in the refinement; rsqrt(inf) = 0 is the answer
}

// e^(x + x_low) for x in [-87, 88.72], within two ulp: Cody-Waite reduction and a degree 7 polynomial
// (Cephes expf). `x_low` carries what rounding to `x` lost.
__device__ __forceinline__ float exp_accurate(float x, float x_low) {
    float n = rintf(__fmul_rn(x, 1.44269504f));
    float r = __fmaf_rn(n, -0.693359375f, x);  // exact: the constant has 10 bits
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    r = __fadd_rn(r, x_low);
    float p = 1.9875691500e-4f;
    p = __fmaf_rn(p, r, 1.3981999507e-3f);
    p = __fmaf_rn(p, r, 8.3334519073e-3f);
    p = __fmaf_rn(p, r, 4.1665795894e-2f);
    p = __fmaf_rn(p, r, 1.6666665459e-1f);
    p = __fmaf_rn(p, r, 5.0000001201e-1f);
    p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
    // 2^n in two factors: n = 128 has no single one.
    int k = (int)n;
    int half = k >> 1;
    float low = __int_as_float((half + 127) << 23);
    float high = __int_as_float((k - half + 127) << 23);
    return __fmul_rn(__fmul_rn(p, low), high);
}

// e^x to about three ulp over all x, saturating at e^88.7; for values that pass through a bf16
// rounding or an L2 norm.
__device__ __forceinline__ float exp_fast(float x) {
    x = min_nan(max_nan(x, -87.0f), 88.7f);
    float t = __fmul_rn(x, 1.44269504f);
    float r = __fmaf_rn(x, 1.44269504f, -t);
    r = __fmaf_rn(x, 1.92596299e-8f, r);
    return __fmul_rn(exp2_approx(t), __fmaf_rn(r, 0.693147181f, 1.0f));
}

// 1 / (1 + e^-x). The clamp keeps the denominator finite; NaN passes.
__device__ __forceinline__ float sigmoid_fast(float x) {
    float d = __fadd_rn(1.0f, exp_fast(-x));
    float r = reciprocal_approx(d);
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}

// log(1 + e) for e in [0, 1], relative error about two ulp: 2 atanh(e / (2 + e)), s <= 1/3.
__device__ __forceinline__ float log1p_accurate(float e) {
    float s = __fdiv_rn(e, __fadd_rn(2.0f, e));
    float s2 = __fmul_rn(s, s);
    float p = 1.0f / 13.0f;
    p = __fmaf_rn(p, s2, 1.0f / 11.0f);
    p = __fmaf_rn(p, s2, 1.0f / 9.0f);
    p = __fmaf_rn(p, s2, 1.0f / 7.0f);
    p = __fmaf_rn(p, s2, 1.0f / 5.0f);
    p = __fmaf_rn(p, s2, 1.0f / 3.0f);
    return __fmul_rn(2.0f, __fmaf_rn(s, __fmul_rn(s2, p), s));
}
