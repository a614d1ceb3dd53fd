#include "lora.h"

#include <algorithm>
#include <stdexcept>

#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

// Rows of a run at most: a panel of `a` stays in the cache for them, and a long prompt is shared out among threads.
constexpr int64_t RUN = 48;

int64_t panels_of(int64_t rank) { return (rank + PANEL - 1) / PANEL; }

// Rows `x` [rows, ldx] times panel `panel` of `weight`, into or onto `out` [rows, ldo].
void multiply(const FolioWeight& weight, int64_t panel, const float* x, int64_t ldx, int64_t rows, float* out, int64_t ldo,
              bool accumulate) {
    if (weight.format == FOLIO_F32)
        small_product(x, ldx, reinterpret_cast<const float*>(weight.data) + panel * weight.k * PANEL, PANEL, weight.k, rows,
                      out, ldo, accumulate);
    else
        small_product(x, ldx, reinterpret_cast<const uint16_t*>(weight.data) + panel * weight.k * PANEL, PANEL, weight.k,
                      rows, out, ldo, accumulate);
}

}  // namespace

int64_t lora_width(const FolioLora& lora, const int32_t* slots, int64_t rows, int64_t linears) {
    int64_t widest = 0;
    int32_t last = -1;
    for (int64_t r = 0; r < rows; r++) {
        int32_t slot = slots[r];
        if (slot < 0 || slot == last) continue;
        last = slot;
        const FolioLoraLinear* adapter = slot < lora.num_slots ? lora.adapters[slot] : nullptr;
        if (!adapter) throw std::runtime_error("a row names an adapter's slot that is empty");
        for (int64_t i = 0; i < linears; i++)
            if (adapter[i].a.data) widest = std::max(widest, adapter[i].a.n);
    }
    return panels_of(widest) * PANEL;
}

void LoraRows::make(const FolioLora& lora, const int32_t* slots, int64_t rows, int64_t width) {
    lora_ = &lora, slots_ = slots, width_ = width;
    order_.clear(), runs_.clear(), distinct_.clear();
    for (int64_t r = 0; r < rows; r++)
        if (slots[r] >= 0) order_.push_back(r);
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
    int64_t count = int64_t(order_.size());
    for (int64_t at = 0; at < count;) {
        int32_t slot = slots[order_[size_t(at)]];
        if (distinct_.empty() || distinct_.back() != slot) distinct_.push_back(slot);
        int64_t end = at + 1;
        while (end < count && end < at + RUN && slots[order_[size_t(end)]] == slot) end++;
        runs_.push_back({slot, at, end});
        at = end;
    }
    if (int64_t(shrunk_.size()) < rows * width) shrunk_.resize(size_t(rows * width));
}

bool LoraRows::uses(int64_t index) const {
    for (int32_t slot : distinct_)
        if (lora_->adapters[slot][index].a.data) return true;
    return false;
}

void LoraRows::shrink(Team& team, int64_t index, const Activations& x) {
    int64_t most = 0;
    for (int32_t slot : distinct_) {
        const FolioWeight& a = lora_->adapters[slot][index].a;
        if (a.data) most = std::max(most, panels_of(a.n));
    }
    int64_t begin, end;
    while (team.take(int64_t(runs_.size()) * most, 1, begin, end)) {
        const LoraRun& run = runs_[size_t(begin / most)];
        const FolioWeight& a = lora_->adapters[run.slot][index].a;
        int64_t panel = begin % most;
        if (!a.data || panel >= panels_of(a.n)) continue;
        for (int64_t at = run.begin; at < run.end;) {  // rows that lie side by side are taken together
            int64_t row = order_[size_t(at)], count = 1;
            while (at + count < run.end && order_[size_t(at + count)] == row + count) count++;
            multiply(a, panel, x.f32.data() + row * x.k, x.k, count, shrunk_.data() + row * width_ + panel * PANEL, width_,
                     false);
            at += count;
        }
    }
}

void LoraRows::expand(int64_t index, int64_t part, int64_t panel, int64_t first, int64_t rows, float* tile) const {
    for (int64_t r = 0; r < rows;) {
        int32_t slot = slots_[first + r];
        int64_t count = 1;
        while (r + count < rows && slots_[first + r + count] == slot) count++;
        if (slot >= 0) {
            const FolioLoraLinear& linear = lora_->adapters[slot][index];
            if (linear.b[part].data)
                multiply(linear.b[part], panel, shrunk_.data() + (first + r) * width_ + linear.offsets[part], width_, count,
                         tile + r * PANEL, PANEL, true);
        }
        r += count;
    }
}

}  // namespace folio
