// Activations that stand out of their row, times their columns of weights as they are stored.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "activations.h"
#include "aligned.h"

namespace folio {

// out [rows][PANEL] += the outliers of rows `first … first + rows` of x times a panel.
void add_outliers(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, float* out);

// Outliers by the tile of rows that are multiplied together. Most stand in the same few columns, whose weights are made of
// stored ones once for all rows.
class TileOutliers {
public:
    // Of rows 0 … rows of x, `tile` together.
    void make(const Activations& x, int64_t rows, int64_t tile);

    // The weights of all columns where something stands out, in a panel of 4-bit weights: [columns][PANEL].
    void columns_of(const FolioWeight& weight, int64_t panel, Aligned<float>& weights) const;

    struct Tile {
        const uint32_t* columns;  // among those that columns_of gives
        const float* values;      // [columns, tile], 0 where a row has none there
        int64_t count;
    };
    Tile of(int64_t first) const {
        int64_t begin = ends_[size_t(first / tile_)], end = ends_[size_t(first / tile_) + 1];
        return {places_.data() + begin, values_.data() + begin * tile_, end - begin};
    }

private:
    int64_t tile_ = 1;
    std::vector<int64_t> ends_;      // [tiles + 1] of each tile's places
    std::vector<uint32_t> places_;   // tile by tile, among columns_
    std::vector<float> values_;      // [places, tile]
    std::vector<uint32_t> columns_;  // of x
    std::vector<int32_t> place_of_;  // [k] of each of them, or −1
};

}  // namespace folio
