// Attention over keys and values as floats, whatever they are stored as.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct F32 {
    static vf load(const uint8_t* p, int64_t i) { return vload(reinterpret_cast<const float*>(p) + i); }
    static float one(const uint8_t* p, int64_t i) {
        float value;
        std::memcpy(&value, p + 4 * i, 4);
        return value;
    }
};
struct BF16 {
    static vf load(const uint8_t* p, int64_t i) { return vload_bf16(reinterpret_cast<const uint16_t*>(p) + i); }
    static float one(const uint8_t* p, int64_t i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        return bf16_to_float(half);
    }
};
struct I8 {
    static vf load(const uint8_t* p, int64_t i) { return vload_s8(reinterpret_cast<const int8_t*>(p) + i); }
    static float one(const uint8_t* p, int64_t i) { return float(int8_t(p[i])); }
};

template <class F>
auto with_format(int64_t format, F&& f) {
    if (format == FOLIO_KV_F32) return f(F32());
    if (format == FOLIO_KV_BF16) return f(BF16());
    return f(I8());
}

float scale_of(const uint8_t* row, int64_t dim) {
    float scale;
    std::memcpy(&scale, row + dim, 4);
    return scale;
}

// scores[r][t] = q[r] · keys[t] for R queries and T keys.
template <class K, int R, int T>
void dots(const float* q, int64_t dim, const uint8_t* const* keys, float* scores) {
    vf acc[R][T];
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int t = 0; t < T; t++) acc[r][t] = vzero();
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vf a[R];
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) a[r] = vload(q + r * dim + i);
        FOLIO_UNROLL
        for (int t = 0; t < T; t++) {
            vf b = K::load(keys[t], i);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) acc[r][t] = vfma(a[r], b, acc[r][t]);
        }
    }
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) {
        float* to = scores + r * UNIT;
        if constexpr (T == 4)
            vsum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], to);
        else
            to[0] = vsum(acc[r][0]);
        for (int64_t j = i; j < dim; j++)
            for (int t = 0; t < T; t++) to[t] += q[r * dim + j] * K::one(keys[t], j);
    }
}

template <class K, int R>
void dots_of_rows(const float* q, int64_t dim, const uint8_t* const* keys, int64_t count, float* scores) {
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) dots<K, R, 4>(q, dim, keys + t, scores + t);
    for (; t < count; t++) dots<K, R, 1>(q, dim, keys + t, scores + t);
}

// out[r][0 … width) += Σ_t weights[r][t] · values[t], columns from `column` on.
template <class V, int R, int W>
void sums(const float* weights, const uint8_t* const* values, int64_t count, int64_t column, float* out, int64_t ldo) {
    vf acc[R][W];
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int w = 0; w < W; w++) acc[r][w] = vload(out + r * ldo + column + w * LANES);
    for (int64_t t = 0; t < count; t++) {
        vf b[W];
        FOLIO_UNROLL
        for (int w = 0; w < W; w++) b[w] = V::load(values[t], column + w * LANES);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vset(weights[r * UNIT + t]);
            FOLIO_UNROLL
            for (int w = 0; w < W; w++) acc[r][w] = vfma(a, b[w], acc[r][w]);
        }
    }
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int w = 0; w < W; w++) vstore(out + r * ldo + column + w * LANES, acc[r][w]);
}

template <class V, int R>
void sums_of_rows(const float* weights, const uint8_t* const* values, int64_t count, int64_t dim, float* out, int64_t ldo) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim && R <= 2; i += 4 * LANES) sums<V, R, 4>(weights, values, count, i, out, ldo);
    for (; i + 2 * LANES <= dim; i += 2 * LANES) sums<V, R, 2>(weights, values, count, i, out, ldo);
    for (; i + LANES <= dim; i += LANES) sums<V, R, 1>(weights, values, count, i, out, ldo);
    for (; i < dim; i++)
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            for (int64_t t = 0; t < count; t++) out[r * ldo + i] += weights[r * UNIT + t] * V::one(values[t], i);
}

// One row of scores to weights: rescales what was summed before. Scores beyond `count` become 0.
void soften(float* scores, int64_t count, float& top, float& sum, float* out, int64_t dim) {
    int64_t i = 0, whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < whole; j++) scores[j] = NOTHING;
    vf tops = vset(NOTHING);
    for (; i < whole; i += LANES) tops = vmax(tops, vload(scores + i));
    float highest = std::max(top, vtop(tops));
    if (highest == NOTHING) {  // nothing may be looked at here: a window ends before, or the unit begins after
        std::memset(scores, 0, size_t(UNIT) * 4);
        return;
    }
    if (highest > top) {
        float factor = top == NOTHING ? 0.0f : std::exp(top - highest);
        sum *= factor;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) vstore(out + d, vmul(vload(out + d), vset(factor)));
        for (; d < dim; d++) out[d] *= factor;
        top = highest;
    }
    vf sums = vzero(), offset = vset(highest);
    for (i = 0; i < whole; i += LANES) {
        vf e = vexp(vsub(vload(scores + i), offset));
        vstore(scores + i, e);
    }
    for (int64_t j = count; j < UNIT; j++) scores[j] = 0;
    for (i = 0; i < whole; i += LANES) sums = vadd(sums, vload(scores + i));
    sum += vsum(sums);
}

// keys [count] rows of dim to panels [4][dim][16]; missing ones are zeros.
template <class K>
void transpose_keys(const uint8_t* const* keys, int64_t count, int64_t dim, bool scaled, float* out) {
    for (int64_t panel = 0; panel < UNIT / PANEL; panel++, out += dim * PANEL) {
        int64_t here = std::clamp<int64_t>(count - panel * PANEL, 0, PANEL);
        if (here < PANEL) std::memset(out, 0, size_t(dim * PANEL) * 4);
        for (int64_t t = 0; t < here; t++) {
            const uint8_t* row = keys[panel * PANEL + t];
            float scale = scaled ? scale_of(row, dim) : 1.0f;
            float line[LANES];
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES) {
                vstore(line, vmul(K::load(row, i), vset(scale)));
                for (int j = 0; j < LANES; j++) out[(i + j) * PANEL + t] = line[j];
            }
            for (; i < dim; i++) out[i * PANEL + t] = scale * K::one(row, i);
        }
    }
}

#if defined(FOLIO_AVX2) || defined(FOLIO_AVX512)
// Eight keys at a time through 8×8 transposes in registers.
void transpose_floats(const float* rows, int64_t dim, float* out) {
    for (int64_t panel = 0; panel < UNIT / PANEL; panel++, out += dim * PANEL)
        for (int64_t half = 0; half < PANEL; half += 8)
            for (int64_t i = 0; i < dim; i += 8) {
                __m256 r[8];
                for (int j = 0; j < 8; j++) r[j] = _mm256_loadu_ps(rows + (panel * PANEL + half + j) * dim + i);
                transpose8(r);
                for (int j = 0; j < 8; j++) _mm256_storeu_ps(out + (i + j) * PANEL + half, r[j]);
            }
}
#endif

// Rows of dim to floats [UNIT][padded]; missing ones and columns are zeros.
template <class V>
void copy_rows(const uint8_t* const* rows, int64_t count, int64_t dim, int64_t padded, bool scaled, float* out) {
    for (int64_t t = 0; t < UNIT; t++, out += padded) {
        if (t >= count) {
            std::memset(out, 0, size_t(padded) * 4);
            continue;
        }
        float scale = scaled ? scale_of(rows[t], dim) : 1.0f;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) vstore(out + i, vmul(V::load(rows[t], i), vset(scale)));
        for (; i < dim; i++) out[i] = scale * V::one(rows[t], i);
        for (; i < padded; i++) out[i] = 0;
    }
}

}  // namespace

void AttentionPlan::single(const Item& item, const Pages& pages, const float* q, int64_t ldq, Attended out, Scratch& s) {
    int64_t rows = item.heads * shared_;
    const float* from = q + step_->starts[item.row] * ldq + item.head * shared_ * dim_;
    float factor = 1.0f / std::sqrt(float(dim_));
    for (int64_t r = 0; r < rows; r++) take_query(from + r * dim_, factor, s.q.data() + r * dim_);
    begin_item(item, s);
    // A single query does little with a key: while one unit is computed, the next one's keys and values are on their way.
    const uint8_t *own_keys[UNIT], *own_values[UNIT];
    Runs runs[2];
    int64_t bytes = pages.row_bytes(), span = item.heads * bytes;
    int at = 0;
    gather(item, pages, item.begin, runs[0]);
    for (int64_t begin = item.begin; begin < item.end; begin += UNIT, at ^= 1) {
        const Runs& now = runs[at];
        if (int64_t next = begin + UNIT; next < item.end) {
            Runs& then = runs[at ^ 1];
            gather(item, pages, next, then);
            for (int64_t t = 0; t < then.tokens; t++)
                for (int64_t byte = 0; byte < span; byte += 64) {
                    __builtin_prefetch(then.keys[t] + byte);
                    __builtin_prefetch(then.values[t] + byte);
                }
        }
        for (int64_t head = 0; head < item.heads; head++) {
            for (int64_t t = 0; t < now.tokens; t++) {
                own_keys[t] = now.keys[t] + head * bytes;
                own_values[t] = now.values[t] + head * bytes;
            }
            with_format(pages.format, [&]<class K>(K) {
                single_unit<K>(pages, own_keys, own_values, now.tokens, head * shared_, s);
            });
        }
    }
    end_item(item, out, s);
}

// Queries first … first + shared of a row, all of one KV head, with `count` of its keys and values.
template <class K>
void AttentionPlan::single_unit(const Pages& pages, const uint8_t* const* keys, const uint8_t* const* values, int64_t count,
                                int64_t first, Scratch& s) const {
    int64_t r = 0, rows = shared_;
    const float* q = s.q.data() + first * dim_;
    float *scores = s.scores.data(), *out = s.out.data() + first * padded_, scales[UNIT];
    auto times_scales = [&](const uint8_t* const* of) {
        for (int64_t t = 0; t < count; t++) scales[t] = scale_of(of[t], dim_);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t t = 0; t < count; t++) scores[i * UNIT + t] *= scales[t];
    };
    for (; r + 3 <= rows; r += 3) dots_of_rows<K, 3>(q + r * dim_, dim_, keys, count, scores + r * UNIT);
    for (; r + 2 <= rows; r += 2) dots_of_rows<K, 2>(q + r * dim_, dim_, keys, count, scores + r * UNIT);
    for (; r < rows; r++) dots_of_rows<K, 1>(q + r * dim_, dim_, keys, count, scores + r * UNIT);
    if (pages.format == FOLIO_KV_I8) times_scales(keys);
    for (r = 0; r < rows; r++)
        soften(scores + r * UNIT, count, s.top[size_t(first + r)], s.sum[size_t(first + r)], out + r * padded_, dim_);
    if (pages.format == FOLIO_KV_I8) times_scales(values);
    for (r = 0; r + 3 <= rows; r += 3)
        sums_of_rows<K, 3>(scores + r * UNIT, values, count, dim_, out + r * padded_, padded_);
    for (; r + 2 <= rows; r += 2)
        sums_of_rows<K, 2>(scores + r * UNIT, values, count, dim_, out + r * padded_, padded_);
    for (; r < rows; r++) sums_of_rows<K, 1>(scores + r * UNIT, values, count, dim_, out + r * padded_, padded_);
}

void AttentionPlan::tile(const Item& item, const Pages& pages, const float* q, int64_t ldq, Attended out, Scratch& s) {
    int64_t rows = item.count * shared_, first = step_->starts[item.row] + item.first;
    int64_t context = step_->used[item.row] - (step_->starts[item.row + 1] - step_->starts[item.row]) + item.first;
    float factor = 1.0f / std::sqrt(float(dim_));
    for (int64_t i = 0; i < item.count; i++) {
        const float* from = q + (first + i) * ldq + item.head * shared_ * dim_;
        float* to = s.q.data() + i * shared_ * dim_;
        for (int64_t j = 0; j < shared_; j++) take_query(from + j * dim_, factor, to + j * dim_);
    }
    begin_item(item, s);
    Runs runs;
    bool scaled = pages.format == FOLIO_KV_I8;
    for (int64_t begin = item.begin; begin < item.end; begin += UNIT) {
        gather(item, pages, begin, runs);
        int64_t count = runs.tokens;
        with_format(pages.format, [&]<class K>(K) {
#if defined(FOLIO_AVX2) || defined(FOLIO_AVX512)
            if (dim_ % 8 == 0) {
                copy_rows<K>(runs.keys, count, dim_, dim_, scaled, s.values.data());
                transpose_floats(s.values.data(), dim_, s.keys.data());
            } else
#endif
                transpose_keys<K>(runs.keys, count, dim_, scaled, s.keys.data());
            copy_rows<K>(runs.values, count, dim_, padded_, scaled, s.values.data());
        });
        for (int64_t panel = 0; panel * PANEL < count; panel++)
            small_product(s.q.data(), dim_, s.keys.data() + panel * dim_ * PANEL, PANEL, dim_, rows,
                          s.scores.data() + panel * PANEL, UNIT, false);
        for (int64_t r = 0; r < rows; r++) {
            int64_t last = context + r / shared_, seen = std::min(count, last + 1 - begin);
            float* scores = s.scores.data() + r * UNIT;
            if (seen < 0) seen = 0;
            if (group_->window)
                for (int64_t t = 0; t < std::min(seen, last + 1 - group_->window - begin); t++) scores[t] = NOTHING;
            soften(scores, seen, s.top[size_t(r)], s.sum[size_t(r)], s.out.data() + r * padded_, padded_);
        }
        for (int64_t column = 0; column < padded_; column += PANEL)
            small_product(s.scores.data(), UNIT, s.values.data() + column, padded_, count, rows, s.out.data() + column,
                          padded_, true);
    }
    end_item(item, out, s);
}

}  // namespace folio
