// The names of simd.h, which includes this file, for AVX-512 with VNNI.
#pragma once

namespace folio {

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
// The sum of each 128 bits.
inline void vsum_lanes(vf a, float* out) {
    a = vadd(a, _mm512_permute_ps(a, 0b01001110));
    a = vadd(a, _mm512_permute_ps(a, 0b10110001));
    a = _mm512_permutexvar_ps(_mm512_set_epi32(12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0), a);
    _mm_storeu_ps(out, _mm512_castps512_ps128(a));
}
// Sums of four vectors at once, in the order of _mm512_reduce.
inline void vsum4(vf a, vf b, vf c, vf d, float* out) {
    vf ab = vadd(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    vf cd = vadd(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    vsum_lanes(vadd(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)), out);
}
// Sums of the halves of two vectors.
inline void vsum_halves(vf a, vf b, float* out) {
    vsum_lanes(vadd(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)), out);
}
inline float vtop(vf a) { return _mm512_reduce_max_ps(a); }
// `x` where a >= b, else 0.
inline vf vwhere_ge(vf a, vf b, vf x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x); }
// A bit for each lane where a > b.
inline unsigned vabove(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// Lanes `from … to`; the others are −∞.
inline vf vbetween(vf a, int from, int to) {
    auto first = [](int count) { return (1u << (count < 0 ? 0 : count < LANES ? count : LANES)) - 1; };
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(first(to) & ~first(from)), a);
}
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
// Of each of 16 pairs of bytes the first or the second.
inline vf vload_s8_of_pairs(const void* p, int which) {
    __m512i pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(which ? pairs : _mm512_slli_epi32(pairs, 24), which ? 8 : 24));
}
inline void vstore_s16(int16_t* p, vf a) {  // whole numbers within range
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
inline void vstore_s8(int8_t* p, vf a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
// Products from 0 to 255, to nearest: what is added leaves a float's lowest bits as the whole number.
inline void vproduct_u8(int8_t* p, vf a, vf b) {
    __m512i whole = _mm512_castps_si512(_mm512_fmadd_ps(a, b, _mm512_set1_ps(12582912.0f)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
}
inline void vstore_bf16(uint16_t* p, vf a) {  // to nearest, ties to even; a NaN stays one
    const __m512i bits = _mm512_castps_si512(a), high = _mm512_srli_epi32(bits, 16), one = _mm512_set1_epi32(1);
    __m512i to_even = _mm512_add_epi32(_mm512_and_si512(high, one), _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, to_even), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// What x is above the whole number below it, 0 for −∞; a · 2^(that whole number).
inline vf vfraction(vf x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline vf vscale2(vf a, vf x) { return _mm512_scalef_ps(a, x); }
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
// Rounded to bytes, in order.
inline vi ibytes(vf a, vf b, vf c, vf d) {
    vi ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    vi cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
    return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0),
                                    _mm512_packs_epi16(ab, cd));
}
// Whole numbers from −32,768 to 65,535, twice in each lane.
inline vi ipairs(vf a) {
    vi all = _mm512_and_si512(_mm512_cvtps_epi32(a), _mm512_set1_epi32(0xffff));
    return _mm512_or_si512(all, _mm512_slli_epi32(all, 16));
}
// For each byte's lower and upper nibble: the upper byte of nibble · factor + addend, which are 16 bits for every two bytes.
inline void scale_nibbles(vi all, vi factor, vi addend, vi& low, vi& high) {
    const vi nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(int16_t(0xff00));
    auto scaled = [&](vi four_bits) { return _mm512_add_epi16(_mm512_mullo_epi16(four_bits, factor), addend); };
    auto bytes = [&](vi even, vi odd) {
        return _mm512_ternarylogic_epi32(_mm512_srli_epi16(scaled(even), 8), scaled(odd), upper, 0xf8);  // a | (b & c)
    };
    low = bytes(_mm512_and_si512(all, nibble), _mm512_and_si512(_mm512_srli_epi16(all, 8), nibble));
    high = bytes(_mm512_and_si512(_mm512_srli_epi16(all, 4), nibble), _mm512_srli_epi16(all, 12));
}
// A nibble of each lane, `shift` bits above its lowest.
inline vi inibble(vi a, int shift) { return _mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(shift)), iset(15)); }
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi ilow4(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline vi ihigh4(vi a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }

}  // namespace folio
