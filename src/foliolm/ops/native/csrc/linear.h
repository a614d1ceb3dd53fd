// Products with packed weights.
#pragma once

#include <cstdint>

#include "abi.h"
#include "activations.h"
#include "pool.h"

namespace folio {

// Bytes of a packed matrix.
int64_t packed_bytes(int64_t format, int64_t n, int64_t k);
// From float32 [n, k], rows contiguous. int8 weights are rotated (rotation.h) before they are rounded.
void pack_floats(int64_t format, int64_t n, int64_t k, const float* rows, uint8_t* packed);
// From ggml's blocks, `row_bytes` a row.
bool pack_ggml(int64_t ggml_type, int64_t format, int64_t n, int64_t k, const uint8_t* rows, uint8_t* packed);
// One row of a packed matrix as floats, as it was before any rotation.
void unpack_row(const FolioWeight& weight, int64_t row, float* out);

// Whether rows of float products are summed in one order, however many there are. Set before a call's threads start.
extern bool one_order;

enum class Into { store, add, silu_mul };

// What adapters add to a linear, once their rows are shrunk: its number among an adapter's linears.
class LoraRows;
struct LoraAddition {
    LoraRows* rows = nullptr;
    int64_t index = 0;
};

// All threads of the team: y = x · Wᵀ + b, or y += that, or (two parts) y = silu(x · W0ᵀ + b0) · (x · W1ᵀ + b1).
// The team must have met at a barrier since `x` was set, and meets at one after this.
// `lora` adds to each product before anything else is done with it.
void linear(Team& team, const FolioLinear& linear, const Activations& x, int64_t rows, float* y, int64_t ldy, Into into,
            LoraAddition lora = {});

// out[r][0..16) (+)= Σ_k x[r][k] · w[k][0..16), rows r of `x` and `out` strided.
void small_product(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, int64_t rows, float* out,
                   int64_t ldo, bool accumulate);
// The same with bfloat16 weights.
void small_product(const float* x, int64_t ldx, const uint16_t* w, int64_t ldw, int64_t k, int64_t rows, float* out,
                   int64_t ldo, bool accumulate);

}  // namespace folio
