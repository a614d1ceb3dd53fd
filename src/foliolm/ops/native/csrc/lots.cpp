#include "lots.h"

#include <algorithm>
#include <unordered_map>

#include "pool.h"

namespace folio {

void Lots::make(const FolioStep& step, int64_t groups, int64_t count, int64_t tile) {
    int64_t tiles = (step.num_tokens + tile - 1) / tile;
    count = std::min(count, tiles);
    cuts_.assign(1, 0);
    for (int64_t lot = 1; lot <= count; lot++) cuts_.push_back(std::min(step.num_tokens, tiles * lot / count * tile));
    needed_.resize(size_t(count));
    for (int64_t lot = 0; lot < count; lot++) needed_[size_t(lot)] = lot;  // a row's own tokens lie before each other
    for (int64_t group = 0; group < groups; group++) need_blocks(step, step.groups[group]);
    if (room_ < count) passes_.reset(new Passes[size_t(count)]), room_ = count;
    for (int64_t lot = 0; lot < count; lot++) passes_[size_t(lot)].done.store(0, std::memory_order_relaxed);
}

int64_t Lots::largest() const {
    int64_t most = 0;
    for (int64_t lot = 0; lot < count(); lot++) most = std::max(most, end(lot) - begin(lot));
    return most;
}

int64_t Lots::of(int64_t token) const {
    return std::upper_bound(cuts_.begin(), cuts_.end(), token) - cuts_.begin() - 1;
}

// A row may see blocks that another one fills in this very step: whole ones, since what is not full has one owner.
void Lots::need_blocks(const FolioStep& step, const FolioGroup& group) {
    std::unordered_map<int64_t, int64_t> writers;
    for (int64_t lot = 0; lot < count(); lot++)
        for (int64_t token = begin(lot); token < end(lot); token++) writers[group.slots[token] / step.block_size] = lot;
    for (int64_t row = 0; row < step.num_rows; row++) {
        int64_t first = step.starts[row], stop = step.starts[row + 1], context = step.used[row] - (stop - first), last = -1;
        const int32_t* table = group.table + row * group.width;
        for (int64_t block = 0; block < context / step.block_size; block++)
            if (auto at = writers.find(table[block]); at != writers.end()) last = std::max(last, at->second);
        for (int64_t lot = of(first); lot < count() && begin(lot) < stop; lot++)
            needed_[size_t(lot)] = std::max(needed_[size_t(lot)], last);
    }
}

void Lots::wait(int64_t lot, uint32_t passes) const {
    for (int64_t other = 0; other <= needed_[size_t(lot)]; other++) {
        std::atomic<uint32_t>& done = passes_[size_t(other)].done;
        for (uint32_t now; (now = done.load(std::memory_order_acquire)) < passes;) wait_for_change(done, now);
    }
}

void Lots::end_pass(int64_t lot) {
    std::atomic<uint32_t>& done = passes_[size_t(lot)].done;
    done.fetch_add(1, std::memory_order_release);
    done.notify_all();
}

}  // namespace folio
