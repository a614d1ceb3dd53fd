// Products of a few rows of 8-bit activations with a panel of 4-bit weights, or of 8-bit weights in blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "activations.h"

namespace folio {

inline bool has_nibbles(const FolioWeight& weight) { return weight.format == FOLIO_Q4_0 || weight.format == FOLIO_Q4_1; }

// Rows `first … first + rows` of x times a panel as it is stored; at most ROWS4 where each row lies by itself, else (not where
// such weights are expanded) ROWS, `first` begins a tile, and with `ahead` the weights of the next panel are asked for meanwhile.
void multiply_nibbles(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, bool ahead,
                      float* out);

// A panel of 4-bit weights as tiles multiply it: scales as floats, weights as bytes, 4 of an output side by side. For more
// than a few rows that costs less than to take them apart for each few.
void expand(const FolioWeight& weight, int64_t panel, std::vector<uint8_t>& expanded);
// The same product with such a panel, of rows that lie together; `first` begins a tile. `ahead`: the weights of the next
// panel are asked for meanwhile.
void multiply_expanded(const FolioWeight& weight, int64_t panel, const uint8_t* expanded, const Activations& x, int64_t first,
                       int64_t rows, bool ahead, float* out);

}  // namespace folio
