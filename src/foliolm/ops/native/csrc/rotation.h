// The rotation under which int8 weights, and the activations that meet them, are rounded.
#pragma once

#include <cstdint>

namespace folio {

// A row times a block-diagonal matrix of normalised Hadamard matrices: blocks of 64, then what is left of k in powers of
// two, the largest first (100 = 64 + 32 + 4). It spreads a value that stands out over its block, so that fewer of the
// rounded steps are spent on it; with weights as well as activations turned, products stay what they were:
// W · x = (W · H) · (Hᵀ · x). The matrix is symmetric and orthogonal: a second time gives the row back, to rounding.
// `x` and `out` [k] may be one. The result is times `scale`.
void hadamard(const float* x, int64_t k, float* out, float scale = 1.0f);

}  // namespace folio
