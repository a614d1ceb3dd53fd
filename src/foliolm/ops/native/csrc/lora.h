// Low-rank additions of adapters to products: rows grouped by adapter are shrunk together, and each tile of a product is
// expanded while it is at hand.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "linear.h"
#include "pool.h"

namespace folio {

constexpr int64_t LORA_LINEARS = 4;  // of a layer

// Rows of one adapter, as many as are shrunk at once.
struct LoraRun {
    int32_t slot;
    int64_t begin, end;  // in LoraRows::order
};

// Rows of a product by adapter, and what their shrinking gave.
class LoraRows {
public:
    // Sorts `rows` rows by slot; every adapter's numbers fit `width`.
    void make(const FolioLora& lora, const int32_t* slots, int64_t rows, int64_t width);
    bool empty() const { return order_.empty(); }
    // All threads of the team: x · aᵀ of every row that has an adapter of linear `index`. They must have met at a barrier
    // since `x`, with floats, was set, and meet at one after this.
    void shrink(Team& team, int64_t index, const Activations& x);
    // tile[r][0..16) += row (first + r) of the shrunk · bᵀ, panel `panel` of part `part`, for `rows` rows.
    void expand(int64_t index, int64_t part, int64_t panel, int64_t first, int64_t rows, float* tile) const;
    // Whether some row's adapter has linear `index`.
    bool uses(int64_t index) const;

private:
    const FolioLora* lora_ = nullptr;
    const int32_t* slots_ = nullptr;
    int64_t width_ = 0;
    std::vector<int64_t> order_;
    std::vector<LoraRun> runs_;
    std::vector<int32_t> distinct_;
    std::vector<float> shrunk_;  // [rows, width]
};

// Numbers that the widest of a step's adapters shrinks to, padded to whole panels.
int64_t lora_width(const FolioLora& lora, const int32_t* slots, int64_t rows, int64_t linears);

}  // namespace folio
