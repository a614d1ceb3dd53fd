// How a step's attention is divided into work items.
#include <algorithm>
#include <iterator>

#include "attention.h"

namespace folio {

void AttentionPlan::make(const FolioStep& step, const FolioGroup& group, int64_t heads, int64_t kv_heads, int64_t dim,
                         const Lots& lots) {
    step_ = &step, group_ = &group, turned_ = step.kv_format == FOLIO_KV_I8;
    heads_ = heads, kv_heads_ = kv_heads, dim_ = dim, shared_ = heads / kv_heads;
    padded_ = (dim + PANEL - 1) / PANEL * PANEL;
    items_.clear(), merges_.clear(), members_.clear(), by_block_.clear();
    int64_t parts = 0, run = Pages{nullptr, nullptr, step.block_size, kv_heads, dim, step.kv_format}.run();
    int64_t queries = std::max<int64_t>(1, TILE / shared_);
    // Heads lie side by side in memory: a thread that takes all of a token's reads it once, in order. Where there is less
    // to hand out than that, heads are work items of their own. A head's result is the same either way.
    int64_t singles = 0;
    for (int64_t row = 0; row < step.num_rows; row++)
        if (step.starts[row + 1] - step.starts[row] == 1) singles += (step.used[row] + SPLIT - 1) / SPLIT;
    int64_t together = lots.count() || singles >= 2 * step.threads ? kv_heads : 1;
    for (int64_t row = 0; row < step.num_rows; row++) {
        int64_t count = step.starts[row + 1] - step.starts[row], context = step.used[row] - count;
        auto lot_of = [&](int64_t query) { return lots.count() ? lots.of(step.starts[row] + query) : int64_t(0); };
        auto lowest = [&](int64_t query) {
            int64_t low = group.window ? std::max<int64_t>(0, context + query + 1 - group.window) : int64_t(0);
            // Whatever the queries, sums begin at whole units where they shall be the same; else where bytes lie together.
            return step.deterministic ? low / UNIT * UNIT : low / run * run;
        };
        if (count == 1 && !step.deterministic) {
            int64_t low = lowest(0), length = step.used[row] - low;
            int64_t splits = (length + SPLIT - 1) / SPLIT;
            int32_t lot = int32_t(lot_of(0));
            for (int64_t head = 0; head < kv_heads; head += together) {
                int64_t first_part = splits > 1 ? parts : -1, merge = int64_t(merges_.size());
                for (int64_t h = head; h < head + together && splits > 1; h++, parts += splits)
                    merges_.push_back({step.starts[row], int32_t(h), int32_t(parts), int32_t(splits)});
                for (int64_t i = 0; i < splits; i++)
                    add_single({int32_t(row), int32_t(head), int32_t(together), 0, 1, int32_t(low + i * SPLIT),
                                int32_t(std::min(low + (i + 1) * SPLIT, step.used[row] + int64_t(0))), lot, -1, 0},
                               {step.starts[row], -1, splits > 1 ? int32_t(first_part + i) : -1, int32_t(splits),
                                int32_t(merge)});
            }
            continue;
        }
        for (int64_t first = 0, here; first < count; first += here) {
            here = std::min(queries, count - first);
            int64_t lot = lot_of(first);
            if (lots.count()) here = std::min(here, lots.end(lot) - step.starts[row] - first);
            for (int64_t head = 0; head < kv_heads; head++)
                items_.push_back({int32_t(row), int32_t(head), 1, int32_t(first), int32_t(here),
                                  int32_t(lowest(first)), int32_t(context + first + here), int32_t(lot), -1, 0});
        }
    }
    // Lot by lot; or the longest first: what is left at the end is then small.
    auto cost = [](const Item& item) {
        return int64_t(item.members ? (1 + item.members) * item.heads : item.count) * (item.end - item.begin);
    };
    std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) {
        return lots.count() ? a.lot < b.lot : cost(a) > cost(b);
    });
    of_outputs_.clear();
    std::copy_if(items_.begin(), items_.end(), std::back_inserter(of_outputs_),
                 [&](const Item& item) { return has_output(item); });
    // What comes next is known early, as long as nobody goes without. The last ones, where small, are another matter: to wait
    // for their keys takes as long as they do.
    bool small = !items_.empty() && items_.back().members && items_.back().end - items_.back().begin <= 2 * UNIT;
    held_ = small ? 0 : 2 * step.threads;
    int64_t merges = int64_t(merges_.size());
    if (room_ < merges) missing_.reset(new std::atomic<int32_t>[size_t(merges)]), room_ = merges;
    for (int64_t i = 0; i < merges; i++) missing_[size_t(i)].store(merges_[size_t(i)].parts, std::memory_order_relaxed);
    if (int64_t size = parts * shared_ * (padded_ + 2); int64_t(partial_.size()) < size) partial_.resize(size_t(size));
    if (in_bytes()) queries_.make(step.num_tokens, kv_heads, shared_, dim);
    if (int64_t(scratch_.size()) < step.threads) scratch_.resize(size_t(step.threads));
    for (auto& s : scratch_) {
        int64_t rows = std::max(TILE, heads);
        auto grow = [](std::vector<float>& v, int64_t size) {
            if (int64_t(v.size()) < size) v.resize(size_t(size));
        };
        grow(s.q, rows * dim), grow(s.keys, 2 * UNIT * padded_), grow(s.values, UNIT * padded_);
        grow(s.scores, rows * UNIT), grow(s.out, rows * padded_), grow(s.top, rows), grow(s.sum, rows);
        if (int64_t size = (rows + heads * BYTE_ROWS) * whole_pieces(dim); int64_t(s.q_bytes.size()) < size) s.q_bytes.resize(size_t(size));
        if (int64_t(s.starts.size()) < rows) s.starts.resize(size_t(rows)), s.ends.resize(size_t(rows));
        for (auto& unit : s.units) unit.grow(dim);
    }
}

// Whether an item is of a token whose hidden state is wanted. Of single queries nearly all are, and splits belong together.
bool AttentionPlan::has_output(const Item& item) const {
    int64_t first = step_->starts[item.row] + item.first;
    return item.count == 1 || std::any_of(step_->outputs, step_->outputs + step_->num_outputs, [&](int64_t token) {
        return token >= first && token < first + item.count;
    });
}

// Whether two items read the same keys and values.
bool AttentionPlan::same_blocks(const Item& a, const Item& b) const {
    if (a.lot != b.lot || a.head != b.head || a.begin != b.begin || a.end != b.end) return false;
    const int32_t *one = group_->table + a.row * group_->width, *other = group_->table + b.row * group_->width;
    int64_t p = step_->block_size;
    return std::equal(one + a.begin / p, one + (a.end - 1) / p + 1, other + b.begin / p);
}

// A single query's split of keys: an item, or one more row for an item that reads the same, as prefixes are shared. Sums are
// the same either way: each row's own, over the same units.
void AttentionPlan::add_single(Item item, Member member) {
    bool may_share = in_bytes() && !group_->window && member.splits > 1;
    int32_t block = group_->table[item.row * group_->width + item.begin / step_->block_size];
    if (may_share) {
        auto [from, to] = by_block_.equal_range(block);
        for (; from != to; ++from) {
            Item& shared = items_[size_t(from->second)];
            if ((shared.members + 1) * item.heads * shared_ > TILE || !same_blocks(shared, item)) continue;
            member.next = shared.member, shared.member = int32_t(members_.size()), shared.members++;
            members_.push_back(member);
            return;
        }
        by_block_.emplace(block, int32_t(items_.size()));
    }
    item.member = int32_t(members_.size()), item.members = 1;
    members_.push_back(member);
    items_.push_back(item);
}

}  // namespace folio
