// The names of simd.h, which includes this file, for AVX2.
#pragma once

namespace folio {

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
// `x` where a >= b, else 0.
inline vf vwhere_ge(vf a, vf b, vf x) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), x); }
// A bit for each lane where a > b.
inline unsigned vabove(vf a, vf b) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
// Lanes `from … to`; the others are −∞.
inline vf vbetween(vf a, int from, int to) {
    __m256 within = _mm256_castsi256_ps(_mm256_andnot_si256(vfirst(from), vfirst(to)));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), a, within);
}
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
// Products from 0 to 127, to nearest.
inline void vproduct_u8(int8_t* p, vf a, vf b) { vstore_s8(p, vmul(a, b)); }
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
// A nibble of each lane, `shift` bits above its lowest.
inline vi inibble(vi a, int shift) { return _mm256_and_si256(_mm256_srl_epi32(a, _mm_cvtsi32_si128(shift)), iset(15)); }
inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi ilow4(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline vi ihigh4(vi a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }

}  // namespace folio
