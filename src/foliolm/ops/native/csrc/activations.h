// Rows of activations in the forms that packed weights multiply.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace folio {

constexpr int GROUP = 32;  // weights that share a scale in blocks
constexpr int BLOCKS = 4;  // of so many blocks a row's 8-bit activations share a scale
constexpr int WIDE = BLOCKS * GROUP;
constexpr int SIDE = 16;   // so many of a row's bytes lie side by side, then those of the next row of its tile

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

// 8-bit integers, WIDE of which share a scale. Rows that a tile multiplies lie `together`, so that it reads them in one
// stream.
struct Bytes {
    std::vector<int8_t> x;        // [rows / together][padded / SIDE][together][SIDE]
    std::vector<float> scale;     // [rows / together][wides][together]
    std::vector<float> sum;       // [rows / together][groups][together] of x
    std::vector<int32_t> offset;  // [rows / together][wides][together] −128 times the sum of x; for octets.h alone
};

// Values that stand out of their row, and are nothing in its 8-bit integers: with a scale for them, 8 bits would leave too
// little of what lies beside them.
struct Outliers {
    float times = 0;               // as many times its row's root mean square is a value that stands out
    int64_t most = 0;              // of a row
    std::vector<uint32_t> count;   // [rows]
    std::vector<uint32_t> column;  // [rows, most]
    std::vector<float> value;      // [rows, most]
};

struct Activations {
    int64_t k = 0, padded = 0, groups = 0, wides = 0;
    Forms forms;
    std::vector<float> f32;      // [rows, k]
    std::vector<uint16_t> bf16;  // [rows, padded] where bfloat16 weights are multiplied in pairs
    Shorts s16, rotated;     // as they are, and after `hadamard`, as int8 weights are stored
    int64_t s16_top = 32767;
    int64_t together = 1;    // rows of 8-bit integers side by side: 1, or ROWS where there are more than FEW
    Bytes s8;
    Outliers outliers;  // of s8

    // `floats`: rows are kept as they are too, whatever the weights' formats want.
    void shape(const FolioLinear& linear, int64_t rows, bool floats = false);
    // Row `row` from `x` [k].
    void set(int64_t row, const float* x);

private:
    // Where a row's 8-bit integers begin, and their scales.
    int64_t first_byte(int64_t row) const { return row / together * together * padded + row % together * SIDE; }
    int64_t first_scale(int64_t row) const { return row / together * together * wides + row % together; }
    void set_s16(Shorts& to, int64_t row, const float* x);
    void set_s8(int64_t row, const float* x);
    float set_wide(int64_t row, int64_t wide, const float* x, float top, float limit);
    float set_apart(int64_t row, int64_t column, float* x, float limit);
};

}  // namespace folio
