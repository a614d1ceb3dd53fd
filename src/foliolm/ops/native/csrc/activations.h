// Rows of activations in the forms that packed weights multiply.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"

namespace folio {

constexpr int GROUP = 32;  // weights that share a scale in blocks

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
    std::vector<uint64_t> fine;       // [rows, words()] a bit a group: whether there is any
    std::vector<int8_t> rest;         // [rows, padded]
    std::vector<float> rest_scale;    // [rows, groups]
    std::vector<float> rest_sum;      // [rows, groups]
    int64_t s16_top = 32767;

    // `floats`: rows are kept as they are too, whatever the weights' formats want.
    void shape(const FolioLinear& linear, int64_t rows, bool floats = false);
    // Row `row` from `x` [k].
    void set(int64_t row, const float* x);
    int64_t words() const { return (groups + 63) / 64; }

private:
    void set_s16(Shorts& to, int64_t row, const float* x);
    void set_s8(int64_t row, const float* x);
    bool set_group(int64_t at, const float* x, float limit);
};

}  // namespace folio
