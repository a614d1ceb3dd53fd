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

#if defined(FOLIO_AVX512)

constexpr int LANES = 16;
using vf = __m512;
using vi = __m512i;
inline vf vzero() { return _mm512_setzero_ps(); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
// The first `count` lanes, at most LANES; the others are 0, or stay in memory what they were.
inline vf vload_some(const float* p, int count) { return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p); }
inline void vstore_some(float* p, vf a, int count) { _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), a); }
inline vf vset(float a) { return _mm512_set1_ps(a); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vabs(vf a) { return _mm512_abs_ps(a); }
inline float vsum(vf a) { return _mm512_reduce_add_ps(a); }
// Four vectors at once, in the order of _mm512_reduce: the results of a, b, c, d in lanes 0 … 3.
template <class Merge>
inline vf vmerge4(vf a, vf b, vf c, vf d, Merge merge) {
    vf ab = merge(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    vf cd = merge(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    vf all = merge(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = merge(all, _mm512_permute_ps(all, 0b01001110));
    all = merge(all, _mm512_permute_ps(all, 0b10110001));
    return _mm512_permutexvar_ps(_mm512_set_epi32(12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0), all);
}
inline void vsum4(vf a, vf b, vf c, vf d, float* out) { _mm_storeu_ps(out, _mm512_castps512_ps128(vmerge4(a, b, c, d, vadd))); }
inline float vtop(vf a) { return _mm512_reduce_max_ps(a); }
inline void vtop4(vf a, vf b, vf c, vf d, float* out) { _mm_storeu_ps(out, _mm512_castps512_ps128(vmerge4(a, b, c, d, vmax))); }
// `x` where a >= b, else 0.
inline vf vwhere_ge(vf a, vf b, vf x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x); }
// Those of `a` that are >= b, side by side from `p` on, where there is room for LANES; returns how many.
inline int vstore_ge(float* p, vf a, vf b) {
    __mmask16 chosen = _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(chosen, a));
    return __builtin_popcount(chosen);
}
struct WideSum {  // of floats, in doubles
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(vf a) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(a)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
    }
    double sum() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};
inline vf vload_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline vf vload_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vf vload_s8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void vstore_s16(int16_t* p, vf a) {  // whole numbers within range
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
inline void vstore_s8(int8_t* p, vf a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
inline void vstore_bf16(uint16_t* p, vf a) {  // to nearest, ties to even; a NaN stays one
    const __m512i bits = _mm512_castps_si512(a), high = _mm512_srli_epi32(bits, 16), one = _mm512_set1_epi32(1);
    __m512i to_even = _mm512_add_epi32(_mm512_and_si512(high, one), _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, to_even), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vpow2(vf n) {  // 2^n for whole n
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline vi iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, vi a) { _mm512_storeu_si512(p, a); }
inline vi izero() { return _mm512_setzero_si512(); }
inline vi iset(int32_t a) { return _mm512_set1_epi32(a); }
inline vi ispread4(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
inline vi iwiden8(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Sums of products of two, or four, with the same ones, at `p`, in every lane: one instruction, which compilers make two of.
typedef int32_t __attribute__((may_alias)) spread_bytes;
inline vi dot2_spread(vi acc, vi w, const void* p) {
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const spread_bytes*>(p)));
    return acc;
}
inline vf ifloat(vi a) { return _mm512_cvtepi32_ps(a); }
// Products of two bfloat16 numbers, summed: what not every CPU with AVX-512 has, and is asked for where it is used.
#define FOLIO_BF16_PRODUCTS 1
inline bool has_bf16_products() { return __builtin_cpu_supports("avx512bf16"); }
inline vf dot2_bf16_spread(vf acc, vi w, const void* p) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const spread_bytes*>(p)));
    return acc;
}
// 32 halves, the first 16 and the second in turns.
inline vi interleave2(vi a) {
    const vi order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                      4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, a);
}
// Sums of products of four unsigned bytes (at most 15) and four signed ones: eight calls, then dot4_sums.
inline vi dot4(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline vi dot4_sums(vi acc) { return acc; }
inline vi dot4_spread(vi acc, vi w, const void* p) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const spread_bytes*>(p)));
    return acc;
}
// Sums of products of four unsigned bytes and four signed ones; two products side by side stay within 16 bits.
inline vi dot4_bytes(vi acc, vi u, vi s) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));  // of the intrinsic's sums, GCC copies each twice in a loop
    return acc;
}
// Signed bytes as unsigned ones, 128 more.
inline vi iflip(vi a) { return _mm512_xor_si512(a, _mm512_set1_epi32(int(0x80808080))); }
inline vi keep(vi a) { return a; }  // there are registers enough
inline vf keep(vf a) { return a; }
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi ilow4(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline vi ihigh4(vi a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }

#elif defined(FOLIO_AVX2)

constexpr int LANES = 8;
using vf = __m256;
using vi = __m256i;
inline vf vzero() { return _mm256_setzero_ps(); }
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
// The first `count` lanes, at most LANES; the others are 0, or stay in memory what they were.
inline __m256i vfirst(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}
inline vf vload_some(const float* p, int count) { return _mm256_maskload_ps(p, vfirst(count)); }
inline void vstore_some(float* p, vf a, int count) { _mm256_maskstore_ps(p, vfirst(count), a); }
inline vf vset(float a) { return _mm256_set1_ps(a); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float vsum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline void vsum4(vf a, vf b, vf c, vf d, float* out) {  // four sums at once
    vf sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
inline float vtop(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline void vtop4(vf a, vf b, vf c, vf d, float* out) {  // the largest of each of four
    vf ab = vmax(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    vf cd = vmax(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    vf tops = vmax(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(tops), _mm256_extractf128_ps(tops, 1)));
}
// `x` where a >= b, else 0.
inline vf vwhere_ge(vf a, vf b, vf x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), x); }
// Those of `a` that are >= b, side by side from `p` on, where there is room for LANES; returns how many.
inline int vstore_ge(float* p, vf a, vf b) {
    unsigned chosen = unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
    if (chosen == 0) return 0;
    // A byte a lane: the chosen lanes' numbers move together.
    uint64_t lanes = _pext_u64(0x0706050403020100, _pdep_u64(chosen, 0x0101010101010101) * 255);
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(lanes)));
    _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(a, order));
    return __builtin_popcount(chosen);
}
struct WideSum {  // of floats, in doubles
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    void add(vf a) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    }
    double sum() const {
        __m256d all = _mm256_add_pd(low, high);
        __m128d two = _mm_add_pd(_mm256_castpd256_pd128(all), _mm256_extractf128_pd(all, 1));
        return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
};
inline vf vload_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline vf vload_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf vload_s8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void vstore_s16(int16_t* p, vf a) {  // whole numbers within range
    __m256i wide = _mm256_cvtps_epi32(a);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
inline void vstore_s8(int8_t* p, vf a) {
    __m256i wide = _mm256_cvtps_epi32(a);
    __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}
inline void vstore_bf16(uint16_t* p, vf a) {
    const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16), one = _mm256_set1_epi32(1);
    __m256i to_even = _mm256_add_epi32(_mm256_and_si256(high, one), _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, to_even), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vpow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline vi iload(const void* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void istore(void* p, vi a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
inline vi izero() { return _mm256_setzero_si256(); }
inline vi iset(int32_t a) { return _mm256_set1_epi32(a); }
inline vi ispread4(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
inline vi iwiden8(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The compiler may not regroup sums or move what they are made of: it would hold all products of a tile at once, and spill.
inline vi keep(vi a) {
    asm("" : "+x"(a));
    return a;
}
inline vf keep(vf a) {
    asm("" : "+x"(a));
    return a;
}
inline vi dot2_spread(vi acc, vi w, const void* p) {
    return keep(_mm256_add_epi32(acc, _mm256_madd_epi16(w, ispread4(p))));
}
inline vf ifloat(vi a) { return _mm256_cvtepi32_ps(a); }
// Pairs are summed in 16 bits: eight products of 15 · 127 fit, twice (and more, the smaller the weights are).
inline vi dot4(vi acc, vi w, vi x) { return keep(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x))); }
inline vi dot4_spread(vi acc, vi w, const void* p) { return dot4(acc, w, ispread4(p)); }
inline vi dot4_sums(vi acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
inline vi dot4_bytes(vi acc, vi u, vi s) { return keep(_mm256_add_epi32(acc, dot4_sums(_mm256_maddubs_epi16(u, s)))); }
inline vi iflip(vi a) { return _mm256_xor_si256(a, _mm256_set1_epi32(int(0x80808080))); }
inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi ilow4(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline vi ihigh4(vi a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }

#else

constexpr int LANES = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef int16_t vshorts __attribute__((vector_size(16)));
typedef uint16_t vwords __attribute__((vector_size(16)));
template <class T>
struct Narrow {  // LANES of a smaller type
    typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
};
template <class T>
inline vi widen(const T* p) {
    typename Narrow<T>::Vector a;
    std::memcpy(&a, p, sizeof a);
    return __builtin_convertvector(a, vi);
}
template <class T>
inline void narrow(T* p, vf whole) {
    auto a = __builtin_convertvector(__builtin_convertvector(whole, vi), typename Narrow<T>::Vector);
    std::memcpy(p, &a, sizeof a);
}
inline vf vzero() { return vf{0, 0, 0, 0}; }
inline vf vload(const float* p) {
    vf a;
    std::memcpy(&a, p, 16);
    return a;
}
inline void vstore(float* p, vf a) { std::memcpy(p, &a, 16); }
inline vf vload_some(const float* p, int count) {
    vf a = {0, 0, 0, 0};
    std::memcpy(&a, p, size_t(count) * 4);
    return a;
}
inline void vstore_some(float* p, vf a, int count) { std::memcpy(p, &a, size_t(count) * 4); }
inline vf vset(float a) { return vf{a, a, a, a}; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vabs(vf a) { return a < 0 ? -a : a; }
inline float vsum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline void vsum4(vf a, vf b, vf c, vf d, float* out) { out[0] = vsum(a), out[1] = vsum(b), out[2] = vsum(c), out[3] = vsum(d); }
inline float vtop(vf a) { return std::fmax(std::fmax(a[0], a[1]), std::fmax(a[2], a[3])); }
inline void vtop4(vf a, vf b, vf c, vf d, float* out) {
    out[0] = vtop(a), out[1] = vtop(b), out[2] = vtop(c), out[3] = vtop(d);
}
inline vf vwhere_ge(vf a, vf b, vf x) { return a >= b ? x : vzero(); }
inline int vstore_ge(float* p, vf a, vf b) {
    int count = 0;
    for (int i = 0; i < 4; i++) {
        p[count] = a[i];
        count += a[i] >= b[i];
    }
    return count;
}
struct WideSum {  // of floats, in doubles
    double lanes[4] = {0, 0, 0, 0};
    void add(vf a) {
        for (int i = 0; i < 4; i++) lanes[i] += double(a[i]);
    }
    double sum() const { return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]); }
};
inline vf vload_bf16(const uint16_t* p) {
    return vf(widen(p) << 16);
}
inline vf vload_f16(const uint16_t* p) {
    return vf{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])};
}
inline vf vload_s8(const int8_t* p) { return __builtin_convertvector(widen(p), vf); }
inline void vstore_s16(int16_t* p, vf a) { narrow(p, a); }  // whole numbers within range
inline void vstore_s8(int8_t* p, vf a) { narrow(p, a); }
inline void vstore_bf16(uint16_t* p, vf a) {
    for (int i = 0; i < LANES; i++) p[i] = float_to_bf16(a[i]);
}
// Beyond 1.5 · 2^23 a float has no fraction; numbers are smaller than that by far.
inline vf vround(vf a) { return a + 12582912.0f - 12582912.0f; }
inline vf vpow2(vf n) {
    vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
    vf result;
    std::memcpy(&result, &bits, 16);
    return result;
}
inline vi iload(const void* p) {
    vi a;
    std::memcpy(&a, p, 16);
    return a;
}
inline void istore(void* p, vi a) { std::memcpy(p, &a, 16); }
inline vi izero() { return vi{0, 0, 0, 0}; }
inline vi iset(int32_t a) { return vi{a, a, a, a}; }
inline vi ispread4(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return vi{four, four, four, four};
}
inline vi iwiden8(const int8_t* p) {
    typedef int8_t Bytes __attribute__((vector_size(8)));
    Bytes a;
    std::memcpy(&a, p, sizeof a);
    return vi(__builtin_convertvector(a, vshorts));
}
inline vi dot2_spread(vi acc, vi w, const void* p) {
    vi x = ispread4(p);
    return acc + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
}
inline vf ifloat(vi a) { return __builtin_convertvector(a, vf); }
inline vi dot4(vi acc, vi w, vi x) {
    // Products of bytes as such of 16 bits, which a sum of two fits in.
    vshorts pairs = vshorts(vwords(w) & 255) * (vshorts(x) << 8 >> 8) + vshorts(vwords(w) >> 8) * (vshorts(x) >> 8);
    return acc + (vi(pairs) << 16 >> 16) + (vi(pairs) >> 16);
}
inline vi dot4_spread(vi acc, vi w, const void* p) { return dot4(acc, w, ispread4(p)); }
inline vi dot4_sums(vi acc) { return acc; }
inline vi dot4_bytes(vi acc, vi u, vi s) { return dot4(acc, u, s); }
inline vi iflip(vi a) { return a ^ int32_t(0x80808080); }
inline vi keep(vi a) { return a; }
inline vf keep(vf a) { return a; }
inline vi iadd(vi a, vi b) { return a + b; }
inline vi ilow4(vi a) { return a & 0x0f0f0f0f; }
inline vi ihigh4(vi a) { return (a >> 4) & 0x0f0f0f0f; }

#endif

constexpr int NV = PANEL / LANES;

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
