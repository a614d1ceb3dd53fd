#include "outliers.h"

#include <algorithm>

#include "blocks.h"
#include "tiles.h"

namespace folio {
namespace {

// Column `c` of a block of 4-bit weights, those of a vector of its outputs.
template <bool MINIMA>
struct NibbleColumn {
    using Block = Stored<MINIMA, 0>;
    static constexpr int64_t SIZE = Block::SIZE;
    static vf get(const uint8_t* block, uint32_t c, int v) {
        vi four = iload(block + Block::HEAD + c % 16 / 4 * 64 + v * 4 * LANES);
        return vfma(ifloat(inibble(four, int(c % 4 * 8 + c / 16 * 4))), Block::scale(block, v), Block::minimum(block, v));
    }
};

#if defined(FOLIO_AVX512)
// Column `c` of a block of 8-bit weights, which elsewhere meet no activations in 8 bits.
struct ByteColumn {
    static constexpr int64_t SIZE = 2 * PANEL + GROUP * PANEL;
    static vf get(const uint8_t* block, uint32_t c, int) {
        vf column = vload_s8_of_pairs(block + 2 * PANEL + c / 2 * 2 * PANEL, int(c % 2));
        return vmul(column, vload_f16(reinterpret_cast<const uint16_t*>(block)));
    }
};
#endif

template <class Column>
void add(const Outliers& outliers, int64_t row, const uint8_t* w, float* out) {
    const uint32_t* column = outliers.column.data() + row * outliers.most;
    const float* value = outliers.value.data() + row * outliers.most;
    for (uint32_t i = 0; i < outliers.count[size_t(row)]; i++) {
        const uint8_t* block = w + column[i] / GROUP * Column::SIZE;
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vf weights = Column::get(block, column[i] % GROUP, v);
            vstore(out + v * LANES, vfma(vset(value[i]), weights, vload(out + v * LANES)));
        }
    }
}

}  // namespace

void add_outliers(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, float* out) {
    const uint8_t* w = panel_data(weight, panel);
    auto* product = weight.format == FOLIO_Q4_0 ? add<NibbleColumn<false>> : add<NibbleColumn<true>>;
#if defined(FOLIO_AVX512)
    if (weight.format == FOLIO_Q8_0) product = add<ByteColumn>;
#endif
    for (int64_t row = first; row < first + rows; row++, out += PANEL)
        if (x.outliers.count[size_t(row)]) product(x.outliers, row, w, out);
}

void TileOutliers::make(const Activations& x, int64_t rows, int64_t tile) {
    tile_ = tile;
    ends_.assign(1, 0), places_.clear(), values_.clear(), columns_.clear();
    place_of_.assign(size_t(x.k), -1);
    for (int64_t first = 0; first < rows; first += tile) {
        for (int64_t row = first; row < std::min(first + tile, rows); row++)
            for (uint32_t i = 0; i < x.outliers.count[size_t(row)]; i++) {
                size_t from = size_t(row * x.outliers.most + i);
                int32_t& place = place_of_[x.outliers.column[from]];
                if (place < 0) place = int32_t(columns_.size()), columns_.push_back(x.outliers.column[from]);
                auto begin = places_.begin() + ends_.back(), at = std::find(begin, places_.end(), uint32_t(place));
                size_t to = size_t(at - places_.begin()) * size_t(tile);
                if (at == places_.end()) places_.push_back(uint32_t(place)), values_.resize(to + size_t(tile));
                values_[to + size_t(row - first)] = x.outliers.value[from];
            }
        ends_.push_back(int64_t(places_.size()));
    }
}

void TileOutliers::columns_of(const FolioWeight& weight, int64_t panel, Aligned<float>& weights) const {
    if (weights.size() < columns_.size() * PANEL) weights.resize(columns_.size() * PANEL);
    const uint8_t* w = panel_data(weight, panel);
    float* to = weights.data();
    auto take = [&]<class Column>(Column) {
        for (uint32_t column : columns_)
            for (int v = 0; v < NV; v++, to += LANES)
                vstore(to, Column::get(w + column / GROUP * Column::SIZE, column % GROUP, v));
    };
    if (weight.format == FOLIO_Q4_0)
        take(NibbleColumn<false>());
    else
        take(NibbleColumn<true>());
}

}  // namespace folio
