// Products with packed weights.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "pool.h"

namespace folio {

constexpr int GROUP = 32;  // weights that share a scale in blocks

// Bytes of a packed matrix.
int64_t packed_bytes(int64_t format, int64_t n, int64_t k);
// From float32 [n, k], rows contiguous. int8 weights are rotated (rotation.h) before they are rounded.
void pack_floats(int64_t format, int64_t n, int64_t k, const float* rows, uint8_t* packed);
// From ggml's blocks, `row_bytes` a row.
bool pack_ggml(int64_t ggml_type, int64_t format, int64_t n, int64_t k, const uint8_t* rows, uint8_t* packed);
// One row of a packed matrix as floats, as it was before any rotation.
void unpack_row(const FolioWeight& weight, int64_t row, float* out);

// Rows of activations in the forms that the weights' formats want.
struct Forms {
    bool f32 = false, s16 = false, rotated = false, s8 = false;
};
Forms forms_of(const FolioLinear& linear);

// Rows of 16-bit integers with a scale each.
struct Shorts {
    std::vector<int16_t> x;    // [rows, padded]
    std::vector<float> scale;  // [rows]; NaN: nothing to be made of that row
};

struct Activations {
    int64_t k = 0, padded = 0, groups = 0;
    Forms forms;
    std::vector<float> f32;           // [rows, k]
    Shorts s16, rotated;              // as they are, and after `hadamard`, as int8 weights are stored
    std::vector<int8_t> s8;           // [rows, padded]
    std::vector<float> s8_scale;      // [rows, groups]
    std::vector<float> s8_sum;        // [rows, groups] sum of the group, its scale in it
    // What 8 bits leave of the groups whose largest value stands out of its row: the same again, zero elsewhere.
    int64_t words() const { return (groups + 63) / 64; }
    std::vector<uint64_t> fine;       // [rows, words()] a bit a group: whether there is any
    std::vector<int8_t> rest;         // [rows, padded]
    std::vector<float> rest_scale;    // [rows, groups]
    std::vector<float> rest_sum;      // [rows, groups]
    int64_t s16_top = 32767;

    // `floats`: rows are kept as they are too, whatever the weights' formats want.
    void shape(const FolioLinear& linear, int64_t rows, bool floats = false);
    // Row `row` from `x` [k].
    void set(int64_t row, const float* x);

private:
    void set_s16(Shorts& to, int64_t row, const float* x);
    void set_s8(int64_t row, const float* x);
    bool set_group(int64_t at, const float* x, float limit);
};

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
