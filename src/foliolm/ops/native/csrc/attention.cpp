#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "rotation.h"
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

// to[i] = from[i] · factor.
void times(const float* from, float factor, int64_t dim, float* to) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) vstore(to + i, vmul(vload(from + i), vset(factor)));
    for (; i < dim; i++) to[i] = from[i] * factor;
}

// to[i] += from[i] · factor.
void add(const float* from, float factor, int64_t dim, float* to) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) vstore(to + i, vfma(vload(from + i), vset(factor), vload(to + i)));
    for (; i < dim; i++) to[i] += from[i] * factor;
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

// The unit of an item's keys and values that begins at position `begin`, its heads' side by side.
void AttentionPlan::gather(const Item& item, const Pages& pages, int64_t begin, Runs& runs) const {
    const int32_t* table = group_->table + item.row * group_->width;
    int64_t p = pages.block_size, stride = pages.kv_heads * pages.run_bytes(), at = 0;
    runs.tokens = std::min<int64_t>(UNIT, item.end - begin), runs.each = pages.run();
    for (int64_t t = 0; t < runs.tokens;) {
        int64_t position = begin + t, within = position % p;
        int64_t offset = pages.offset(int64_t(table[position / p]) * p + within, item.head);
        for (int64_t stop = std::min(runs.tokens, t + p - within); t < stop; t += runs.each, offset += stride, at++) {
            runs.keys[at] = pages.keys + offset;
            runs.values[at] = pages.values + offset;
        }
    }
}

void AttentionPlan::single(const Item& item, const Pages& pages, const float* q, int64_t ldq, float* out, Scratch& s) {
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

void AttentionPlan::take_query(const float* from, float factor, float* to) const {
    if (turned_)
        hadamard(from, dim_, to, factor);
    else
        times(from, factor, dim_, to);
}

// Rows of queries with one KV head of an item.
int64_t AttentionPlan::rows_of(const Item& item) const { return (item.members ? item.members : item.count) * shared_; }

// Sums of no keys yet, for each of an item's rows: head by head, token by token, then the queries that share a KV head.
void AttentionPlan::begin_item(const Item& item, Scratch& s) const {
    int64_t rows = item.heads * rows_of(item);
    s.members.clear();
    for (int32_t at = item.member; item.members && at >= 0; at = members_[size_t(at)].next)
        s.members.push_back(&members_[size_t(at)]);
    std::fill_n(s.top.begin(), rows, NOTHING);
    std::fill_n(s.sum.begin(), rows, 0.0f);
    std::fill_n(s.out.begin(), rows * padded_, 0.0f);
}

// A finished item's results, or a split's for the merge.
void AttentionPlan::end_item(const Item& item, float* out, const Scratch& s) {
    int64_t token = step_->starts[item.row] + item.first, each = rows_of(item);
    for (int64_t r = 0; r < item.heads * each; r++) {
        const float* from = s.out.data() + r * padded_;
        float top = s.top[size_t(r)], sum = s.sum[size_t(r)];
        int64_t head = r / each, query = r % each / shared_, own = r % shared_;
        const Member* member = item.members ? s.members[size_t(query)] : nullptr;
        if (member && member->part >= 0) {
            float* to = partial_.data() + ((member->part + head * member->splits) * shared_ + own) * (padded_ + 2);
            std::memcpy(to, from, size_t(dim_) * 4);
            to[padded_] = top, to[padded_ + 1] = sum;
            continue;
        }
        int64_t at = member ? member->token : token + query;
        float* to = out + (at * heads_ + (item.head + head) * shared_ + own) * dim_;
        times(from, 1.0f / sum, dim_, to);
        if (turned_) hadamard(to, dim_, to);
    }
}

// Keys and values in 8 bits, whatever the item. While a unit is computed, the next one's are on their way: the item's own, or
// the first of the item that this thread does next.
void AttentionPlan::bytes(const Item& item, const Item* next_item, const Pages& pages, const float* q, int64_t ldq, float* out, Scratch& s) {
    int64_t first = step_->starts[item.row] + item.first, each = rows_of(item);
    int64_t context = step_->used[item.row] - (step_->starts[item.row + 1] - step_->starts[item.row]) + item.first;
    float factor = 1.44269504f / std::sqrt(float(dim_));  // log2(e): scores are powers of two
    int64_t head_queries = query_tiles(each) * BYTE_ROWS * dim_;
    begin_item(item, s);
    for (int64_t r = 0; r < item.heads * each; r++) {
        int64_t head = item.head + r / each, query = r % each / shared_;
        int64_t token = item.members ? s.members[size_t(query)]->token : first + query;
        const float* from = q + token * ldq + (head * shared_ + r % shared_) * dim_;
        take_query(from, factor, s.keys.data());
        int8_t* to = s.q_bytes.data() + r / each * head_queries + query_place(r % each, dim_);
        s.q[size_t(r)] = query_bytes(s.keys.data(), dim_, to, s.starts[size_t(r)]);
    }
    Runs runs[2];
    int64_t head_bytes = pages.run_bytes(), together = std::clamp<int64_t>(BYTE_ROWS / each, 1, BYTE_HEADS);
    int at = 0;
    gather(item, pages, item.begin, runs[0]);
    for (int64_t begin = item.begin; begin < item.end; begin += UNIT, at ^= 1) {
        const Runs& now = runs[at];
        Runs& then = runs[at ^ 1];
        then.tokens = 0;
        const Item* next = begin + UNIT < item.end ? &item : next_item;
        if (next) gather(*next, pages, next == &item ? begin + UNIT : next->begin, then);
        int64_t calls = item.heads * (TAKE_FETCHES + meet_fetches(each, dim_));
        Ahead ahead(then, next ? next->heads * head_bytes : 0, calls);
        for (int64_t head = 0; head < item.heads; head += together) {
            int64_t heads = std::min(together, item.heads - head), base = head * each;
            for (int64_t h = 0; h < heads; h++) s.units[h].take(now, (head + h) * head_bytes, dim_, ahead);
            ByteRows rows{s.q_bytes.data() + head * head_queries, head_queries, s.starts.data() + base, s.q.data() + base,
                          s.top.data() + base, s.sum.data() + base, s.out.data() + base * padded_, padded_};
            for (int64_t r = 0; r < each; r += BYTE_ROWS) {
                int64_t hidden[BYTE_ROWS], seen[BYTE_ROWS], some = std::min<int64_t>(BYTE_ROWS, each - r);
                for (int64_t i = 0; i < heads * some; i++) {
                    int64_t query = item.members ? 0 : (r + i % some) / shared_, end = context + query + 1 - begin;
                    seen[i] = std::clamp<int64_t>(end, 0, now.tokens);
                    hidden[i] = group_->window ? std::clamp<int64_t>(end - group_->window, 0, seen[i]) : 0;
                }
                meet_unit(s.units, heads, dim_, rows, r, some, hidden, seen, ahead);
            }
        }
    }
    end_item(item, out, s);
}

void AttentionPlan::tile(const Item& item, const Pages& pages, const float* q, int64_t ldq, float* out, Scratch& s) {
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

void AttentionPlan::run(Team& team, int thread, const Pages& pages, const float* q, int64_t ldq, float* out, Lines* coming) {
    Scratch& s = scratch_[size_t(thread)];
    int64_t begin, end, total = int64_t(items_.size());
    auto take = [&](int64_t left) {
        return team.take(total, 1, begin, end, left) ? &items_[size_t(begin)] : nullptr;
    };
    for (const Item *item = take(0), *next; item; item = next ? next : take(0)) {
        next = take(2 * team.size());  // what comes next is known early, as long as nobody goes without
        if (has_bytes(pages))
            bytes(*item, next, pages, q, ldq, out, s);
        else if (step_->starts[item->row + 1] - step_->starts[item->row] == 1 && !step_->deterministic)
            single(*item, pages, q, ldq, out, s);
        else
            tile(*item, pages, q, ldq, out, s);
    }
    team.barrier(coming);
    if (merges_.empty()) return;
    bool in_twos = has_bytes(pages);
    while (team.take(int64_t(merges_.size()), 1, begin, end)) {
        const Merge& merge = merges_[size_t(begin)];
        for (int64_t r = 0; r < shared_; r++) {
            auto part = [&](int64_t i) { return partial_.data() + ((merge.part + i) * shared_ + r) * (padded_ + 2); };
            float top = NOTHING, sum = 0;
            for (int64_t i = 0; i < merge.parts; i++) top = std::max(top, part(i)[padded_]);
            float* to = out + merge.token * heads_ * dim_ + (merge.head * shared_ + r) * dim_;
            std::memset(to, 0, size_t(dim_) * 4);
            for (int64_t i = 0; i < merge.parts; i++) {
                float factor = in_twos ? std::exp2(part(i)[padded_] - top) : std::exp(part(i)[padded_] - top);
                sum += factor * part(i)[padded_ + 1];
                add(part(i), factor, dim_, to);
            }
            times(to, 1.0f / sum, dim_, to);
            if (turned_) hadamard(to, dim_, to);
        }
    }
    team.barrier(coming);
}

}  // namespace folio
