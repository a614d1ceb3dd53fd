// Vectors of floats and of small integers behind one set of names, for AVX-512 (VNNI), AVX2 and any other target.
//
// A panel is always PANEL outputs wide, so that packed weights are the same on every target: it takes NV vectors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if !defined(FOLIO_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define FOLIO_AVX512 1
#define FOLIO_ISA "avx512-vnni"
#elif !defined(FOLIO_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__BMI2__)
#define FOLIO_AVX2 1
#define FOLIO_ISA "avx2"
#else
#define FOLIO_ISA "portable"
#endif

#if defined(FOLIO_UNROLL)  // left empty where code shall be small
#elif defined(__clang__)
#define FOLIO_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FOLIO_UNROLL _Pragma("GCC unroll 16")
#endif

namespace folio {

constexpr int PANEL = 16;

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float bf16_to_float(uint16_t half) { return bits_to_float(uint32_t(half) << 16); }

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {  // zero and subnormals
        float value = float(mantissa) * 5.9604644775390625e-08f;
        return sign ? -value : value;
    }
    return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even; too large becomes infinity.
inline uint16_t float_to_f16(float value) {
    uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u) return uint16_t(sign | (bits > 0x7f800000u ? 0x7e00 : 0x7c00));
    if (bits < 0x38800000u) {
        float scaled = bits_to_float(bits) * 16777216.0f;  // in units of the smallest subnormal
        return uint16_t(sign | uint16_t(std::nearbyint(scaled)));
    }
    uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1);
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace folio

#if defined(FOLIO_AVX512)
#include "simd_avx512.h"
#elif defined(FOLIO_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace folio {

constexpr int NV = PANEL / LANES;

// What is loaded after this stays after it. Compilers load early, and hold in registers what sums would need them for.
inline void in_order() { asm volatile("" ::: "memory"); }

// An address that is computed once: compilers else keep its distance to others in registers, of which there are not enough.
template <class T>
inline T* opaque(T* p) {
    asm("" : "+r"(p));
    return p;
}

// e^x to about 1e-7 relative; x at most 88. Cody and Waite's reduction, then a polynomial of degree 6.
inline vf vexp(vf x) {
    x = vmax(x, vset(-87.0f));
    vf n = vround(vmul(x, vset(1.44269504088896341f)));
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vadd(vfma(vmul(r, r), p, r), vset(1.0f));
    return vmul(p, vpow2(n));
}

#if defined(FOLIO_AVX2) || defined(FOLIO_AVX512)
// Eight rows of eight lanes of 32 bits: rows and columns change places.
inline void transpose8(__m256 (&r)[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
#endif

// Rows become lanes: what `op` makes of each of R vectors' lanes, in the order of vsum. Pairs of vectors are halved into one
// until one is left; the pairs are such that its lanes are the rows in order.
#if defined(FOLIO_AVX512) || defined(FOLIO_AVX2)
template <int R, int APART, int BEFORE, class Halve>  // BEFORE: distances that were halved before
inline void vhalve(vf (&v)[LANES], Halve halve) {
    FOLIO_UNROLL
    for (int i = 0; i < R; i++)
        if (!(i & (APART | BEFORE))) v[i] = halve(v[i], i + APART < R ? v[i + APART] : v[i]);
}
#endif
#if defined(FOLIO_AVX512)
template <int R, class Op>
inline vf vacross(vf (&v)[LANES], Op op) {
    vhalve<R, 4, 0>(v, [&](vf a, vf b) { return op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); });
    vhalve<R, 8, 4>(v, [&](vf a, vf b) { return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); });
    vhalve<R, 1, 12>(v, [&](vf a, vf b) { return op(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); });
    vhalve<R, 2, 13>(v, [&](vf a, vf b) { return op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); });
    return v[0];
}
#elif defined(FOLIO_AVX2)
template <int R, class Op>
inline vf vacross(vf (&v)[LANES], Op op) {
    vhalve<R, 4, 0>(v, [&](vf a, vf b) { return op(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); });
    vhalve<R, 1, 4>(v, [&](vf a, vf b) { return op(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)); });
    vhalve<R, 2, 5>(v, [&](vf a, vf b) { return op(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)); });
    return v[0];
}
#else
template <int R, class Op>
inline vf vacross(vf (&v)[LANES], Op op) {
    vf all = vzero();
    for (int i = 0; i < R; i++) {
        vf two = op(v[i], vf{v[i][2], v[i][3], 0, 0});
        all[i] = op(two, vf{two[1], 0, 0, 0})[0];
    }
    return all;
}
#endif
template <int R>
inline vf vsums(vf (&v)[LANES]) { return vacross<R>(v, [](vf a, vf b) { return vadd(a, b); }); }
template <int R>
inline vf vtops(vf (&v)[LANES]) { return vacross<R>(v, [](vf a, vf b) { return vmax(a, b); }); }

inline vf vsilu(vf x) {
    // Far below zero the result vanishes before e^-x overflows.
    vf e = vexp(vmin(vsub(vzero(), x), vset(80.0f)));
    return vdiv(x, vadd(vset(1.0f), e));
}

// A vector's own LANES-point Hadamard transform, not normalised: butterflies 1, 2, 4, ... lanes apart.
#if defined(FOLIO_AVX512)
inline vf vhadamard(vf a) {
    const vf by1 = _mm512_set_ps(-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1);
    const vf by2 = _mm512_set_ps(-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1);
    const vf by4 = _mm512_set_ps(-1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1);
    const vf by8 = _mm512_set_ps(-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1);
    a = vfma(a, by1, _mm512_permute_ps(a, 0b10110001));
    a = vfma(a, by2, _mm512_permute_ps(a, 0b01001110));
    a = vfma(a, by4, _mm512_shuffle_f32x4(a, a, 0b10110001));
    return vfma(a, by8, _mm512_shuffle_f32x4(a, a, 0b01001110));
}
#elif defined(FOLIO_AVX2)
inline vf vhadamard(vf a) {
    const vf by1 = _mm256_set_ps(-1, 1, -1, 1, -1, 1, -1, 1), by2 = _mm256_set_ps(-1, -1, 1, 1, -1, -1, 1, 1);
    const vf by4 = _mm256_set_ps(-1, -1, -1, -1, 1, 1, 1, 1);
    a = vfma(a, by1, _mm256_permute_ps(a, 0b10110001));
    a = vfma(a, by2, _mm256_permute_ps(a, 0b01001110));
    return vfma(a, by4, _mm256_permute2f128_ps(a, a, 1));
}
#else
inline vf vhadamard(vf a) {
    float sum = a[0] + a[1], difference = a[0] - a[1], sum2 = a[2] + a[3], difference2 = a[2] - a[3];
    return vf{sum + sum2, difference + difference2, sum - sum2, difference - difference2};
}
#endif

}  // namespace folio
