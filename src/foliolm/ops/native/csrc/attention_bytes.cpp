#include "attention_bytes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace folio {
namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
#if defined(FOLIO_AVX512)
constexpr int SUMS = 24;  // rows times panels that registers hold the sums of
#else
constexpr int SUMS = 6;
#endif
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

// Panels that R rows meet together: each four of the rows is then loaded once for all of them, and there are sums enough
// under way to hide how long a product takes.
template <int R>
constexpr int panels_of() {
    return R <= SUMS / 4 ? 4 : R <= SUMS / 2 ? 2 : 1;
}

template <int R, int P>
using Sums = vi[R][P * NV];

// sums[r][p][lane] += Σ x[r][i] · w[p][i / 4][lane][i % 4] over `quads` fours, a row's fours STEP bytes apart and rows LDX;
// KEYS are flipped to meet rows with a sign.
template <int R, int P, bool KEYS, int STEP, int LDX>
inline void add_dots(Sums<R, P>& sums, const int8_t* x, const int8_t* const* w, int64_t quads) {
    for (int64_t t = 0; t < quads; t++, x += STEP) {
        vi part[P * NV];
        FOLIO_UNROLL
        for (int v = 0; v < P * NV; v++) {
            part[v] = iload(w[v / NV] + t * QUAD + v % NV * 4 * LANES);
            if constexpr (KEYS) part[v] = iflip(part[v]);
        }
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vi four = ispread4(x + r * LDX);
            FOLIO_UNROLL
            for (int v = 0; v < P * NV; v++)
                sums[r][v] = KEYS ? dot4_bytes(sums[r][v], part[v], four) : dot4_bytes(sums[r][v], four, part[v]);
        }
    }
}

// scores[r][key] in units of the row's factor, for P panels of keys.
template <int R, int P>
inline void scores_of_panels(const ByteUnit& unit, int64_t dim, const int8_t* q, const int32_t* starts, int64_t panel,
                             float* scores) {
    Sums<R, P> sums;
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < P * NV; v++) sums[r][v] = iset(starts[r]);
    add_dots<R, P, true, 4 * BYTE_ROWS, 4>(sums, q, unit.keys + panel, dim / 4);
    FOLIO_UNROLL
    for (int v = 0; v < P * NV; v++) {
        vf scale = vload(unit.key_scales + panel * PANEL + v * LANES);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) vstore(scores + r * UNIT + panel * PANEL + v * LANES, vmul(ifloat(sums[r][v]), scale));
    }
}

// Those of the unit's first `count` keys, and of some behind them.
template <int R>
void scores_of(const ByteUnit& unit, int64_t dim, const int8_t* q, const int32_t* starts, int64_t count, float* scores,
               Ahead& ahead) {
    constexpr int P = panels_of<R>();
    int64_t panel = 0, panels = (count + PANEL - 1) / PANEL;
    for (; panel + P <= panels; panel += P) {
        ahead.fetch(P);
        scores_of_panels<R, P>(unit, dim, q, starts, panel, scores);
    }
    for (; panel < panels; panel++) {
        ahead.fetch();
        scores_of_panels<R, 1>(unit, dim, q, starts, panel, scores);
    }
}

// 2^x for x at most 0, to about 1e-6 relative.
inline vf exp2_of(vf x) {
    x = vmax(x, vset(-126.0f));
    vf n = vround(x), f = vsub(x, n);
    vf p = vset(1.3333558e-3f);
    p = vfma(p, f, vset(9.6181291e-3f));
    p = vfma(p, f, vset(5.5504109e-2f));
    p = vfma(p, f, vset(2.4022651e-1f));
    p = vfma(p, f, vset(6.9314718e-1f));
    return vmul(vfma(p, f, vset(1.0f)), vpow2(n));
}

// The same to 1e-4, for what becomes 7 bits.
inline vf roughly_exp2_of(vf x) {
#if defined(FOLIO_AVX512)
    vf f = vfraction(x), p = vset(7.7067055e-2f);
    p = vfma(p, f, vset(2.2764498e-1f));
    p = vfma(p, f, vset(6.9511679e-1f));
    return vscale2(vfma(p, f, vset(1.0f)), x);
#else
    x = vmax(x, vset(-100.0f));  // products with it are not denormal
    vf n = vround(x), f = vsub(x, n), p = vset(5.5008932e-2f);
    p = vfma(p, f, vset(2.4221096e-1f));
    p = vfma(p, f, vset(6.9328292e-1f));
    return vmul(vfma(p, f, vset(1.0f)), vpow2(n));
#endif
}

// R rows of scores to weights in bytes, with their scales, and how much `less` what was summed before counts now: a row's
// highest score, which its weights are powers below of, is a new one. Of the unit, `count` vectors hold keys that some row
// sees: a constant where all do, as nearly always.
template <int R, class Count>
void soften(float* scores, Count count, const int64_t* hidden, const int64_t* seen, const float* const* value_scales,
            const ByteRows& rows, int64_t first, int8_t* weights, float* scales, float* less) {
    const int vectors = count;
    vf most[LANES], sums[LANES];
    for (int r = 0; r < R; r++) {
        float* row = scores + r * UNIT;
        if (hidden[r] > 0 || seen[r] < vectors * LANES)
            for (int i = 0; i < vectors; i++)
                vstore(row + i * LANES, vbetween(vload(row + i * LANES), int(hidden[r] - i * LANES), int(seen[r] - i * LANES)));
        most[r] = vload(row);
        FOLIO_UNROLL
        for (int i = 1; i < vectors; i++) most[r] = vmax(most[r], vload(row + i * LANES));
    }
    vf before = vload_some(rows.top + first, R), factors = vload_some(rows.factor + first, R);
    // A number even where a row sees nothing yet: its weights are then 0.
    vf tops = vmax(vmax(vmul(vtops<R>(most), factors), before), vset(-1e30f)), fewer = exp2_of(vsub(before, tops));
    float highest[LANES], inverse[LANES];
    vstore(highest, tops), vstore(less, fewer), vstore_some(rows.top + first, tops, R);
    for (int r = 0; r < R; r++) {
        float* row = scores + r * UNIT;
        vf times = vset(rows.factor[first + r]), offset = vset(-highest[r]);
        sums[r] = vzero(), most[r] = vzero();
        FOLIO_UNROLL
        for (int i = 0; i < vectors; i++) {
            vf e = roughly_exp2_of(vfma(vload(row + i * LANES), times, offset));
            vf weight = vmul(e, vload(value_scales[r] + i * LANES));
            vstore(row + i * LANES, weight);
            sums[r] = vadd(sums[r], e), most[r] = vmax(most[r], weight);
        }
    }
    vstore_some(rows.sum + first, vadd(vmul(vload_some(rows.sum + first, R), fewer), vsums<R>(sums)), R);
    // Where all values are next to nothing, the inverse would overflow.
    vf largest = vtops<R>(most), tiny = vset(1e-30f);
    vstore(inverse, vwhere_ge(largest, tiny, vdiv(vset(127.0f), largest)));
    vstore(scales, vwhere_ge(largest, tiny, vdiv(largest, vset(127.0f))));
    for (int r = 0; r < R; r++) {
        vf times = vset(inverse[r]);
        FOLIO_UNROLL
        for (int i = 0; i < vectors; i++)
            vround_s8(weights + r * UNIT + i * LANES, vmul(vload(scores + r * UNIT + i * LANES), times));
    }
}

// Adds the weighted values to P panels of columns.
template <int R, int P>
inline void add_panels(const ByteUnit& unit, const int8_t* weights, const float* scales, const float* less, int64_t count,
                       int64_t panel, float* out, int64_t ldo) {
    Sums<R, P> sums;
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < P * NV; v++) sums[r][v] = izero();
    for (int64_t t = 0; t < count; t += PANEL) {
        const int8_t* values[P];
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) values[p] = unit.values[t / PANEL] + value_place(0, (panel + p) * PANEL);
        add_dots<R, P, false, 4, UNIT>(sums, weights + t, values, PANEL / 4);
    }
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) {
        vf scale = vset(scales[r]), fewer = vset(less[r]);
        FOLIO_UNROLL
        for (int v = 0; v < P * NV; v++) {
            float* to = out + r * ldo + panel * PANEL + v * LANES;
            vstore(to, vfma(ifloat(sums[r][v]), scale, vmul(vload(to), fewer)));
        }
    }
}

template <int R>
void add_values(const ByteUnit& unit, int64_t dim, const int8_t* weights, const float* scales, const float* less, int64_t count,
                float* out, int64_t ldo, Ahead& ahead) {
    constexpr int P = panels_of<R>();
    int64_t panel = 0, panels = dim / PANEL;
    for (; panel + P <= panels; panel += P) {
        ahead.fetch(P);
        add_panels<R, P>(unit, weights, scales, less, count, panel, out, ldo);
    }
    for (; panel < panels; panel++) {
        ahead.fetch();
        add_panels<R, 1>(unit, weights, scales, less, count, panel, out, ldo);
    }
}

// f of `count` as a constant, from 1 to R.
template <int R = BYTE_ROWS, class F>
void with_rows(int64_t count, F&& f) {
    if constexpr (R > 0) {
        if (count == R) return f(std::integral_constant<int, R>());
        with_rows<R - 1>(count, f);
    }
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

float query_bytes(const float* q, int64_t dim, int8_t* place, int32_t& start) {
    vf tops = vzero(), most = vset(63.0f), sums = vzero();
    for (int64_t i = 0; i < dim; i += LANES) tops = vmax(tops, vabs(vload(q + i)));
    float top = std::max(vtop(tops), 1e-30f);
    vf inverse = vset(63.0f / top);
    for (int64_t i = 0; i < dim; i += LANES) {
        // Within bounds even where a query is not finite.
        vf whole = vmax(vmin(vround(vmul(vload(q + i), inverse)), most), vsub(vzero(), most));
        sums = vadd(sums, whole);
        int8_t bytes[LANES];
        vstore_s8(bytes, whole);
        FOLIO_UNROLL
        for (int j = 0; j < LANES; j += 4) std::memcpy(place + (i + j) * BYTE_ROWS, bytes + j, 4);
    }
    start = -128 * int32_t(vsum(sums));
    return top / 63.0f;
}

void meet_unit(const ByteUnit* units, int64_t heads, int64_t dim, const ByteRows& rows, int64_t first, int64_t count,
               const int64_t* hidden, const int64_t* seen, Ahead& ahead) {
    alignas(64) float scores[BYTE_ROWS * UNIT];
    alignas(64) int8_t weights[BYTE_ROWS * UNIT];
    float scales[LANES], less[LANES];
    const float* value_scales[BYTE_ROWS];
    int64_t keys = *std::max_element(seen, seen + heads * count);
    if (keys <= 0) return;
    int vectors = int((keys + PANEL - 1) / PANEL) * NV;
    with_rows(count, [&](auto r) {
        for (int64_t h = 0; h < heads; h++)
            scores_of<r()>(units[h], dim, rows.q + h * rows.ldq + first * dim, rows.start + first + h * count, keys,
                           scores + h * count * UNIT, ahead);
    });
    for (int64_t i = 0; i < heads * count; i++) value_scales[i] = units[i / count].value_scales;
    with_rows(heads * count, [&](auto r) {
        auto all = std::integral_constant<int, UNIT / LANES>();
        if (vectors == all)
            soften<r()>(scores, all, hidden, seen, value_scales, rows, first, weights, scales, less);
        else
            soften<r()>(scores, vectors, hidden, seen, value_scales, rows, first, weights, scales, less);
    });
    with_rows(count, [&](auto r) {
        for (int64_t h = 0; h < heads; h++)
            add_values<r()>(units[h], dim, weights + h * count * UNIT, scales + h * count, less + h * count, keys,
                            rows.out + (first + h * count) * rows.ldo, rows.ldo, ahead);
    });
}

}  // namespace folio
