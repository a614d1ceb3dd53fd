#include "attention_bytes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace folio {
namespace {

#if defined(FOLIO_AVX512)
constexpr int SUMS = 24;  // rows times panels that registers hold the sums of
#else
constexpr int SUMS = 6;
#endif
// Panels that R rows meet together: each four of the rows is then loaded once for all of them, and there are sums enough
// under way to hide how long a product takes.
template <int R>
constexpr int panels_of() {
    return R <= SUMS / 4 ? 4 : R <= SUMS / 2 ? 2 : 1;
}

template <int R, int P>
using Sums = vi[R][P * NV];

// sums[r][p][lane] += Σ x[r][i] · w[p][i / 4][lane][i % 4] over `quads` fours, rows LDX apart; KEYS are flipped to meet rows
// with a sign.
template <int R, int P, bool KEYS, int LDX>
inline void add_dots(Sums<R, P>& sums, const int8_t* x, const int8_t* const* w, int64_t quads) {
    for (int64_t t = 0; t < quads; t++, x += 4) {
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
    for (int64_t i = 0; i < dim; i += PIECE) {
        const int8_t* keys[P];
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) keys[p] = unit.keys[panel + p] + key_place(0, i);
        add_dots<R, P, true, PIECE>(sums, q + i * BYTE_ROWS, keys, std::min(PIECE, dim - i) / 4);
    }
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
    vstore(inverse, vwhere_ge(largest, tiny, vdiv(vset(WEIGHT_TOP), largest)));
    vstore(scales, vwhere_ge(largest, tiny, vdiv(largest, vset(WEIGHT_TOP))));
    for (int r = 0; r < R; r++) {
        vf times = vset(inverse[r]);
        FOLIO_UNROLL
        for (int i = 0; i < vectors; i++)
            vproduct_u8(weights + r * UNIT + i * LANES, vload(scores + r * UNIT + i * LANES), times);
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
        add_dots<R, P, false, UNIT>(sums, weights + t, values, PANEL / 4);
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
            scores_of<r()>(units[h], dim, rows.q + h * rows.ldq + first * whole_pieces(dim), rows.start + first + h * count, keys,
                           scores + h * count * UNIT, ahead);
    });
    for (int64_t h = 0, i = 0; h < heads; h++)
        for (int64_t stop = i + count; i < stop; i++) value_scales[i] = units[h].value_scales;
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
