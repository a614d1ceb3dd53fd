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

enum class Into { store, add, silu_mul };

// What adapters add to a linear, once their rows are shrunk: its number among an adapter's linears.
class LoraRows;
struct LoraAddition {
    LoraRows* rows = nullptr;
    int64_t index = 0;
};

// Rows up to which a product waits for its weights rather than for its multiplications. Each thread then does some panels of
// its own before it takes what is left, so that it can fetch the first of their weights before it begins.
constexpr int64_t WAITING_ROWS = 4;
Lines first_lines(const FolioLinear& linear, Into into, int64_t threads, int64_t thread);

// All threads of the team: y = x · Wᵀ + b, or y += that, or (two parts) y = silu(x · W0ᵀ + b0) · (x · W1ᵀ + b1).
// The team must have met at a barrier since `x` was set, and meets at one after this.
// `lora` adds to each product before anything else is done with it.
void linear(Team& team, int thread, const FolioLinear& linear, const Activations& x, int64_t rows, float* y, int64_t ldy,
            Into into, LoraAddition lora = {});

}  // namespace folio
