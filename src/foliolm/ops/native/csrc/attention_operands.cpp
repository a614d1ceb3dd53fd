// What attention over bytes multiplies, made ready: units of keys and values, and queries.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_bytes.h"
#include "rotation.h"

namespace folio {
namespace {

#if defined(FOLIO_AVX2) || defined(FOLIO_AVX512)
// Four bytes of each of eight rows, eight times.
inline void transpose_quads(const int8_t* const* rows, int64_t at, int8_t* out) {
    __m256 r[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
    transpose8(r);
    for (int i = 0; i < 8; i++) _mm256_storeu_ps(reinterpret_cast<float*>(out + i * QUAD), r[i]);
}

// Sixteen bytes of each of four rows: those of one column side by side.
inline void interleave4(const int8_t* const* rows, int64_t at, int8_t* out) {
    __m128i r[4];
    for (int i = 0; i < 4; i++) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at));
    __m128i low01 = _mm_unpacklo_epi8(r[0], r[1]), high01 = _mm_unpackhi_epi8(r[0], r[1]);
    __m128i low23 = _mm_unpacklo_epi8(r[2], r[3]), high23 = _mm_unpackhi_epi8(r[2], r[3]);
    __m128i* to = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(to, _mm_unpacklo_epi16(low01, low23));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(low01, low23));
    _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(high01, high23));
    _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(high01, high23));
}
#else
inline void interleave4(const int8_t* const* rows, int64_t at, int8_t* out) {
    for (int column = 0; column < PANEL; column++)
        for (int i = 0; i < 4; i++) out[column * 4 + i] = rows[i][at + column];
}
#endif

// A panel of keys from rows.
void pack_keys(const int8_t* const* rows, int64_t dim, int8_t* out) {
    int64_t i = 0;
#if defined(FOLIO_AVX2) || defined(FOLIO_AVX512)
    for (; i + 32 <= dim; i += 32)
        for (int half = 0; half < PANEL; half += 8) transpose_quads(rows + half, i, out + key_place(half, i));
#endif
    for (; i < dim; i += 4)
        for (int key = 0; key < PANEL; key++) std::memcpy(out + key_place(key, i), rows[key] + i, 4);
}

// The scales of a panel's first `there` tokens; 0 for the others.
inline void take_scales(const int8_t* from, int64_t there, float* to) {
    FOLIO_UNROLL
    for (int i = 0; i < PANEL; i += LANES)
        vstore(to + i, vload_some(reinterpret_cast<const float*>(from) + i, int(std::clamp<int64_t>(there - i, 0, LANES))));
}

// A query to bytes; returns its scale, never 0, and where its scores start.
float query_bytes(const float* q, int64_t dim, int8_t* to, int32_t& start) {
    vf tops = vzero(), most = vset(QUERY_TOP), sums = vzero();
    for (int64_t i = 0; i < dim; i += LANES) tops = vmax(tops, vabs(vload(q + i)));
    float top = std::max(vtop(tops), 1e-30f);
    vf inverse = vset(QUERY_TOP / top);
    for (int64_t i = 0; i < dim; i += LANES) {
        // Within bounds even where a query is not finite.
        vf whole = vmax(vmin(vround(vmul(vload(q + i), inverse)), most), vsub(vzero(), most));
        sums = vadd(sums, whole);
        vstore_s8(to + i, whole);
    }
    start = -128 * int32_t(vsum(sums));
    return top / QUERY_TOP;
}

}  // namespace

void ByteUnit::grow(int64_t dim) {
    if (int64_t(zeros_.size()) >= dim) return;
    own_keys_.resize(size_t(UNIT * dim)), own_values_.resize(size_t(UNIT * dim)), zeros_.resize(size_t(dim));
}

void ByteUnit::take(const Runs& runs, int64_t offset, int64_t dim, Ahead& ahead) {
    for (int64_t first = 0; first < runs.tokens; first += PANEL) {
        int64_t panel = first / PANEL, there = std::min<int64_t>(PANEL, runs.tokens - first);
        ahead.fetch();
        if (runs.each == 1) {
            pack(runs, offset, dim, first, there);
        } else {
            keys[panel] = reinterpret_cast<const int8_t*>(runs.keys[panel] + offset);
            values[panel] = reinterpret_cast<const int8_t*>(runs.values[panel] + offset);
            // What lies behind the last token is left of others, or never was written.
            take_scales(keys[panel] + dim * PANEL, there, key_scales + first);
            take_scales(values[panel] + dim * PANEL, there, value_scales + first);
        }
    }
    for (int64_t t = (runs.tokens + PANEL - 1) / PANEL * PANEL; t < UNIT; t++) value_scales[t] = 0;
}

// A panel of the unit's own, of rows: `there` tokens from `first` on.
void ByteUnit::pack(const Runs& runs, int64_t offset, int64_t dim, int64_t first, int64_t there) {
    const int8_t *k[PANEL], *v[PANEL];
    for (int64_t t = 0; t < PANEL; t++) {
        k[t] = t < there ? reinterpret_cast<const int8_t*>(runs.keys[first + t] + offset) : zeros_.data();
        v[t] = t < there ? reinterpret_cast<const int8_t*>(runs.values[first + t] + offset) : zeros_.data();
        key_scales[first + t] = value_scales[first + t] = 0;
        if (t >= there) continue;
        std::memcpy(key_scales + first + t, k[t] + dim, 4);
        std::memcpy(value_scales + first + t, v[t] + dim, 4);
    }
    int8_t *own_keys = own_keys_.data() + first * dim, *own_values = own_values_.data() + first * dim;
    pack_keys(k, dim, own_keys);
    for (int64_t t = 0; t < PANEL; t += 4)
        for (int64_t i = 0; i < dim; i += PANEL) interleave4(v + t, i, own_values + value_place(t, i));
    keys[first / PANEL] = own_keys, values[first / PANEL] = own_values;
}

void ByteQueries::make(int64_t tokens, int64_t kv_heads, int64_t shared, int64_t dim) {
    kv_heads_ = kv_heads, shared_ = shared, dim_ = dim;
    stride_ = (shared * (whole_pieces(dim) + 8) + 63) / 64 * 64;
    if (size_t size = size_t(tokens * kv_heads * stride_ + 63); memory_.size() < size) memory_.resize(size);
    data_ = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
}

void ByteQueries::set(int64_t token, int64_t head, float* q) {
    int8_t *to = at(token, head), *factors = to + shared_ * whole_pieces(dim_), *starts = factors + shared_ * 4;
    float factor = 1.44269504f / std::sqrt(float(dim_));  // log2(e): scores are powers of two
    for (int64_t own = 0; own < shared_; own++, q += dim_) {
        hadamard(q, dim_, q, factor);
        int32_t start;
        float scale = query_bytes(q, dim_, to + own * whole_pieces(dim_), start);
        std::memcpy(factors + own * 4, &scale, 4);
        std::memcpy(starts + own * 4, &start, 4);
    }
}

void ByteQueries::get(int64_t token, int64_t head, int64_t own, int8_t* place, float& factor, int32_t& start) const {
    const int8_t *from = at(token, head), *factors = from + shared_ * whole_pieces(dim_);
    std::memcpy(&factor, factors + own * 4, 4);
    std::memcpy(&start, factors + (shared_ + own) * 4, 4);
    for (int64_t i = 0; i < dim_; i += PIECE) std::memcpy(place + i * BYTE_ROWS, from + own * whole_pieces(dim_) + i, PIECE);
}

}  // namespace folio
