// Products of a few rows with a panel of packed weights: what a thread does at once.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "activations.h"
#include "nibbles.h"
#include "simd.h"

namespace folio {

// Whether rows of float products are summed in one order, however many there are. Set before a call's threads start.
extern bool one_order;

// Whether so many rows meet bfloat16 weights rounded to bfloat16 as well, in pairs of products: twice as fast, where the CPU
// has such products. A few rows wait for memory anyway, and are not rounded.
bool in_pairs(int64_t rows);

// Whether so many rows meet 8-bit weights in blocks with 8 bits as well instead of 16.
bool in_bytes(int64_t rows);

inline int64_t panels(const FolioWeight& weight) { return (weight.n + PANEL - 1) / PANEL; }
const uint8_t* panel_data(const FolioWeight& weight, int64_t panel);

// Rows `first … first + rows` of x times a panel as it is stored, into out [rows][PANEL]; at most ROWS (4-bit weights: see
// nibbles.h, also for `ahead`).
void multiply_stored(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, bool ahead,
                     float* out);

// out[r][0..16) (+)= Σ_k x[r][k] · w[k][0..16), rows r of `x` and `out` strided.
void small_product(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, int64_t rows, float* out,
                   int64_t ldo, bool accumulate);
// The same with bfloat16 weights.
void small_product(const float* x, int64_t ldx, const uint16_t* w, int64_t ldw, int64_t k, int64_t rows, float* out,
                   int64_t ldo, bool accumulate);

}  // namespace folio
