#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "rotation.h"
#include "simd.h"

namespace folio {
namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

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

// A part of a row's and head's results is there: those of all parts, if it was the last.
void AttentionPlan::merge_if_last(int64_t index, Attended out) {
    const Merge& merge = merges_[size_t(index)];
    std::atomic<int32_t>& missing = missing_[size_t(index)];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    missing.store(merge.parts, std::memory_order_relaxed);  // of the next layer
    bool in_twos = in_bytes();
    for (int64_t r = 0; r < shared_; r++) {
        auto part = [&](int64_t i) { return partial_.data() + ((merge.part + i) * shared_ + r) * (padded_ + 2); };
        float top = NOTHING, sum = 0;
        for (int64_t i = 0; i < merge.parts; i++) top = std::max(top, part(i)[padded_]);
        float* to = place(out, merge.token, merge.head * shared_ + r);
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

// A finished item's results, or parts of some.
void AttentionPlan::end_item(const Item& item, Attended out, const Scratch& s) {
    int64_t token = step_->starts[item.row] + item.first, queries = rows_of(item) / shared_, r = 0;
    for (int64_t head = 0; head < item.heads; head++)
        for (int64_t query = 0; query < queries; query++) {
            const Member* member = item.members ? s.members[size_t(query)] : nullptr;
            int64_t at = member ? member->token : token + query;
            for (int64_t own = 0; own < shared_; own++, r++) {
                const float* from = s.out.data() + r * padded_;
                float top = s.top[size_t(r)], sum = s.sum[size_t(r)];
                if (member && member->part >= 0) {
                    float* to = partial_.data() + ((member->part + head * member->splits) * shared_ + own) * (padded_ + 2);
                    std::memcpy(to, from, size_t(dim_) * 4);
                    to[padded_] = top, to[padded_ + 1] = sum;
                    continue;
                }
                float* to = place(out, at, (item.head + head) * shared_ + own);
                times(from, 1.0f / sum, dim_, to);
                if (turned_) hadamard(to, dim_, to);
            }
        }
    for (const Member* member : s.members)
        for (int64_t head = 0; member->part >= 0 && head < item.heads; head++) merge_if_last(member->merge + head, out);
}

// An item's queries as tiles of bytes, and the last key that each sees.
void AttentionPlan::gather_queries(const Item& item, Scratch& s) const {
    int64_t first = step_->starts[item.row] + item.first, queries = rows_of(item) / shared_, r = 0;
    int64_t context = step_->used[item.row] - (step_->starts[item.row + 1] - step_->starts[item.row]) + item.first;
    for (int64_t head = 0; head < item.heads; head++) {
        int8_t* tiles = s.q_bytes.data() + head * query_tiles(rows_of(item)) * BYTE_ROWS * whole_pieces(dim_);
        for (int64_t query = 0; query < queries; query++) {
            int64_t token = item.members ? s.members[size_t(query)]->token : first + query;
            for (int64_t own = 0; own < shared_; own++, r++) {
                int8_t* to = tiles + query_place(query * shared_ + own, dim_);
                queries_.get(token, item.head + head, own, to, s.q[size_t(r)], s.starts[size_t(r)]);
                s.ends[size_t(r)] = int32_t(context + (item.members ? 0 : query) + 1);
            }
        }
    }
}

// Keys and values in 8 bits, whatever the item. While a unit is computed, the next one's are on their way: the item's own, or
// the first of the item that this thread does next.
void AttentionPlan::bytes(const Item& item, const Item* next_item, const Pages& pages, Attended out, Scratch& s) {
    int64_t each = rows_of(item), head_queries = query_tiles(each) * BYTE_ROWS * whole_pieces(dim_);
    begin_item(item, s);
    gather_queries(item, s);
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
                    int64_t end = s.ends[size_t(base + r + i)] - begin;
                    seen[i] = std::clamp<int64_t>(end, 0, now.tokens);
                    hidden[i] = group_->window ? std::clamp<int64_t>(end - group_->window, 0, seen[i]) : 0;
                }
                meet_unit(s.units, heads, dim_, rows, r, some, hidden, seen, ahead);
            }
        }
    }
    end_item(item, out, s);
}

void AttentionPlan::compute(const Item& item, const Item* next, const Pages& pages, const float* q, int64_t ldq, Attended out,
                            Scratch& s) {
    if (in_bytes())
        bytes(item, next, pages, out, s);
    else if (step_->starts[item.row + 1] - step_->starts[item.row] == 1 && !step_->deterministic)
        single(item, pages, q, ldq, out, s);
    else
        tile(item, pages, q, ldq, out, s);
}

void AttentionPlan::run(Team& team, int thread, const Pages& pages, const float* q, int64_t ldq, float* out, Lines* coming,
                        bool outputs) {
    Scratch& s = scratch_[size_t(thread)];
    const std::vector<Item>& items = outputs ? of_outputs_ : items_;
    int64_t begin, end, total = int64_t(items.size());
    auto take = [&](int64_t left) {
        return team.take(total, 1, begin, end, left) ? &items[size_t(begin)] : nullptr;
    };
    for (const Item *item = take(0), *next; item; item = next ? next : take(0)) {
        next = take(held_);
        compute(*item, next, pages, q, ldq, {out, 0}, s);
    }
    team.barrier(coming);
}

void AttentionPlan::run_lot(int thread, int64_t lot, const Pages& pages, const float* q, int64_t ldq, Attended out,
                            bool outputs) {
    const std::vector<Item>& items = outputs ? of_outputs_ : items_;
    auto earlier = [](const auto& each, int64_t than) { return each.lot < than; };
    auto item = std::lower_bound(items.begin(), items.end(), lot, earlier);
    for (auto stop = std::lower_bound(item, items.end(), lot + 1, earlier); item != stop; ++item)
        compute(*item, item + 1 != stop ? &*(item + 1) : nullptr, pages, q, ldq, out, scratch_[size_t(thread)]);
}

}  // namespace folio
