// Rows of activations in the forms that packed weights multiply.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace folio {

constexpr int GROUP = 32;  // weights that share a scale in blocks

// As many rows a tile as accumulators fit in registers; of FEW rows or less, which lie each by itself, ROWS4 with 4-bit weights.
#if defined(FOLIO_AVX512)
constexpr int ROWS = 12, ROWS4 = 4;
constexpr int64_t FEW = 4;
// Whether 4-bit weights are taken apart once for all rows, where there are more than FEW. With registers for so many rows
// a tile it costs nothing to do so in each.
constexpr bool EXPANDS = false;
#else
constexpr int ROWS = 6, ROWS4 = 4;
constexpr int64_t FEW = 12;
constexpr bool EXPANDS = true;
#endif

// Rows of activations in the forms that the weights' formats want.
struct Forms {
    bool f32 = false, bf16 = false, s16 = false, rotated = false, s8 = false;
};
Forms forms_of(const FolioLinear& linear);

// Rows of 16-bit integers with a scale each.
struct Shorts {
    std::vector<int16_t> x;    // [rows, padded]
    std::vector<float> scale;  // [rows]; NaN: nothing to be made of that row
};

// Groups of 8-bit integers with a scale each. Rows that a tile multiplies lie `together`, so that it reads them in one stream.
struct Bytes {
    std::vector<int8_t> x;          // [rows / together][padded / 4][together][4]
    std::vector<float> scale, sum;  // [rows / together][groups][together]; a group's sum has its scale in it
};

struct Activations {
    int64_t k = 0, padded = 0, groups = 0;
    Forms forms;
    std::vector<float> f32;      // [rows, k]
    std::vector<uint16_t> bf16;  // [rows, padded] where bfloat16 weights are multiplied in pairs
    Shorts s16, rotated;     // as they are, and after `hadamard`, as int8 weights are stored
    int64_t s16_top = 32767;
    int64_t together = 1;    // rows of 8-bit integers side by side: 1, or ROWS where there are more than FEW
    Bytes s8;
    // What 8 bits leave of the groups whose largest value stands out of its row: the same again, zero elsewhere.
    Bytes rest;
    std::vector<uint64_t> fine;  // [rows, words()] a bit a group: whether there is any

    // `floats`: rows are kept as they are too, whatever the weights' formats want.
    void shape(const FolioLinear& linear, int64_t rows, bool floats = false);
    // Row `row` from `x` [k].
    void set(int64_t row, const float* x);
    int64_t words() const { return (groups + 63) / 64; }

private:
    // Where a row's 8-bit integers begin, and its scales.
    int64_t first_byte(int64_t row) const { return row / together * together * padded + row % together * 4; }
    int64_t first_group(int64_t row) const { return row / together * together * groups + row % together; }
    void set_s16(Shorts& to, int64_t row, const float* x);
    void set_s8(int64_t row, const float* x);
    bool set_rest(int64_t byte, int64_t at, const float* x, float limit);
    void write_group(Bytes& to, int64_t byte, int64_t at, const vf (&whole)[GROUP / LANES], float scale) const;
};

}  // namespace folio
