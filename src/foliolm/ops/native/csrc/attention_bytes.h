// Attention over 8-bit keys and values in whole numbers: a few times fewer instructions than over floats made of them.
//
// Queries and the softmax's weights are rounded to 7 bits without a sign, so that a pair of products with 8 signed bits
// fits in 16: queries with a scale a row, weights with one a row and unit of keys, the values' scales among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace folio {

constexpr int64_t UNIT = 64;  // keys that are looked at together

// Rows of queries that accumulators fit in registers for.
#if defined(FOLIO_AVX512)
constexpr int BYTE_ROWS = 12;
#else
constexpr int BYTE_ROWS = 6;
#endif

// Whether heads of so many dimensions can be computed so: whole panels.
inline bool has_byte_panels(int64_t dim) { return dim % PANEL == 0; }

// One head's rows of a unit where they lie: `dim` values, a float scale behind them, from byte `offset` on of each token's.
struct ByteHead {
    const uint8_t *const *keys, *const *values;
    int64_t count, offset;
};

// Keys and values that will be packed soon, of all heads that are computed, asked for a few tokens at a time between what is
// computed meanwhile: a core waits for some twenty lines of memory at once, and a burst of more holds up the loads behind it.
class Ahead {
public:
    // `count` tokens of `bytes` each, in about `calls` calls.
    Ahead(const uint8_t* const* keys, const uint8_t* const* values, int64_t count, int64_t bytes, int64_t calls)
        : keys_(keys), values_(values), count_(count), bytes_(bytes), each_((count + calls - 1) / calls) {}
    void fetch() {
        for (int64_t end = std::min(at_ + each_, count_); at_ < end; at_++)
            for (int64_t byte = 0; byte < bytes_; byte += 64) {
                __builtin_prefetch(keys_[at_] + byte);
                __builtin_prefetch(values_[at_] + byte);
            }
    }

private:
    const uint8_t *const *keys_, *const *values_;
    int64_t count_, bytes_, each_, at_ = 0;
};

// A unit's keys and values of one KV head, as tiles read them: four of what is summed side by side.
struct ByteUnit {
    std::vector<int8_t> keys;    // [UNIT / PANEL][dim / 4][PANEL][4]
    std::vector<int8_t> values;  // [dim / PANEL][UNIT / 4][PANEL][4]
    std::vector<int8_t> zeros;   // [dim], in place of rows that there are not
    float key_scales[UNIT], value_scales[UNIT];
    int32_t key_starts[UNIT];    // what takes the queries' zero point out of the sums

    void grow(int64_t dim);
    void pack(const ByteHead& head, int64_t dim, Ahead& ahead);
};

// A query to [dim] bytes around 64; returns its scale, never 0.
float query_bytes(const float* q, int64_t dim, uint8_t* out);

// Rows of one KV head while keys go by.
struct ByteRows {
    const uint8_t* q;     // [rows, dim]
    const float* factor;  // [rows] from whole numbers to scores, as powers of two
    float *top, *sum;     // [rows] the largest score so far, and the sum of 2^(score − top)
    float* out;           // [rows, ldo] the weighted values' sums
    int64_t ldo;
};

// How often a unit's packing asks for what is ahead, and its meeting with some rows.
constexpr int64_t PACK_FETCHES = UNIT / PANEL;
inline int64_t meet_fetches(int64_t rows, int64_t dim) {
    return (rows + BYTE_ROWS - 1) / BYTE_ROWS * (UNIT / PANEL + dim / PANEL);
}

// Rows `first … first + rows` (at most BYTE_ROWS) meet a unit: row r sees keys `hidden[r] … seen[r]` of it.
void meet_unit(const ByteUnit& unit, int64_t dim, const ByteRows& rows, int64_t first, int64_t count, const int64_t* hidden,
               const int64_t* seen, Ahead& ahead);

}  // namespace folio
