// Attention over 8-bit keys and values in whole numbers: a few times fewer instructions than over floats made of them.
//
// Products are of a byte without a sign and one with a sign. Queries are rounded to ±QUERY_TOP, with a scale a row, and meet
// keys that are made unsigned on the way, 128 more: what that adds is one number a row. The softmax's weights are rounded to
// 0 … WEIGHT_TOP, with a scale a row and unit of keys, the values' scales among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pages.h"
#include "simd.h"

namespace folio {

constexpr int64_t UNIT = 64;  // keys that are looked at together

// Rows of queries that accumulators fit in registers for, and lanes of a vector.
#if defined(FOLIO_AVX512)
constexpr int BYTE_ROWS = 12;
#elif defined(FOLIO_AVX2)
constexpr int BYTE_ROWS = 6;
#else
constexpr int BYTE_ROWS = 4;
#endif
static_assert(BYTE_ROWS <= LANES);

// The largest query and weight in bytes: all 8 bits where products of bytes are summed without overflow, else 7 of them, of
// which a sum of two products fits in 16 bits.
#if defined(FOLIO_AVX512)
constexpr float QUERY_TOP = 127.0f, WEIGHT_TOP = 255.0f;
#else
constexpr float QUERY_TOP = 63.0f, WEIGHT_TOP = 127.0f;
#endif

// Heads that few rows meet together at most (see meet_unit).
constexpr int64_t BYTE_HEADS = 4;

// Whether heads of so many dimensions can be computed so: whole panels.
inline bool has_byte_panels(int64_t dim) { return dim % PANEL == 0; }

// Where a unit's keys and values lie, those of a few heads side by side: runs of tokens (see Pages).
struct Runs {
    const uint8_t *keys[UNIT], *values[UNIT];
    int64_t tokens = 0, each = 1;  // tokens in all, and of a run
    int64_t count() const { return (tokens + each - 1) / each; }
};

// Runs that will be read soon, asked for a few lines at a time between what is computed meanwhile: a core waits for some
// twenty lines of memory at once, and a burst of more holds up the loads behind it.
class Ahead {
public:
    // `bytes` of each run, in about `calls` calls.
    Ahead(const Runs& runs, int64_t bytes, int64_t calls) : runs_(runs), bytes_(bytes), count_(runs.count()) {
        lines_ = (count_ * ((bytes + 63) / 64) + calls - 1) / calls;
    }
    void fetch(int64_t calls = 1) {
        for (int64_t left = calls * lines_; left > 0 && run_ < count_; left--) {
            __builtin_prefetch(runs_.keys[run_] + byte_);
            __builtin_prefetch(runs_.values[run_] + byte_);
            if ((byte_ += 64) >= bytes_) byte_ = 0, run_++;
        }
    }

private:
    const Runs& runs_;
    int64_t bytes_, count_, lines_, run_ = 0, byte_ = 0;
};

// A unit's keys and values of one KV head, as tiles read them: panels (see pages.h), where they lie or made of rows.
class ByteUnit {
public:
    const int8_t *keys[UNIT / PANEL], *values[UNIT / PANEL];
    float key_scales[UNIT], value_scales[UNIT];  // 0 for tokens that there are not

    void grow(int64_t dim);

    // The head whose bytes begin at `offset` of each run.
    void take(const Runs& runs, int64_t offset, int64_t dim, Ahead& ahead);

private:
    void pack(const Runs& runs, int64_t offset, int64_t dim, int64_t first, int64_t there);

    std::vector<int8_t> own_keys_, own_values_, zeros_;  // panels made of rows; [dim] in place of rows that there are not
};

// Queries lie in tiles of BYTE_ROWS, [dims / PIECE][BYTE_ROWS][PIECE], the last piece padded. Those of one KV head begin a
// tile.
constexpr int64_t PIECE = 64;
inline int64_t whole_pieces(int64_t dim) { return (dim + PIECE - 1) / PIECE * PIECE; }
inline int64_t query_tiles(int64_t rows) { return (rows + BYTE_ROWS - 1) / BYTE_ROWS; }
inline int64_t query_place(int64_t row, int64_t dim) {
    return row / BYTE_ROWS * BYTE_ROWS * whole_pieces(dim) + row % BYTE_ROWS * PIECE;
}

// The queries of a token that share a KV head, in bytes: once a layer, however many units of keys and work items they meet.
class ByteQueries {
public:
    void make(int64_t tokens, int64_t kv_heads, int64_t shared, int64_t dim);

    // Turns queries [shared, dim] in place, and rounds them to bytes.
    void set(int64_t token, int64_t head, float* q);

    // Query `own` of them to its place in a tile; its scale, never 0, and where its scores start, which takes out what keys
    // have too much.
    void get(int64_t token, int64_t head, int64_t own, int8_t* place, float& factor, int32_t& start) const;

private:
    int8_t* at(int64_t token, int64_t head) const { return data_ + (token * kv_heads_ + head) * stride_; }

    int64_t kv_heads_ = 0, shared_ = 0, dim_ = 0, stride_ = 0;
    std::vector<int8_t> memory_;
    int8_t* data_ = nullptr;  // of a token and KV head: [shared, whole_pieces(dim)], the factors, the starts
};

// Rows of a KV head while keys go by, and behind them those of the next.
struct ByteRows {
    const int8_t* q;       // tiles
    int64_t ldq;           // from one head's tiles to the next one's
    const int32_t* start;  // [rows]
    const float* factor;   // [rows] from whole numbers to scores, as powers of two
    float *top, *sum;      // [rows] the largest score so far, and the sum of 2^(score − top)
    float* out;            // [rows, ldo] the weighted values' sums
    int64_t ldo;
};

// How often the taking of a unit asks for what is ahead, and its meeting with some rows.
constexpr int64_t TAKE_FETCHES = UNIT / PANEL;
inline int64_t meet_fetches(int64_t rows, int64_t dim) {
    return query_tiles(rows) * (UNIT / PANEL + dim / PANEL);
}

// Rows `first … first + count` of a head, a tile or what there is of it, meet a unit of keys: row r sees keys
// `hidden[r] … seen[r]` of it. Where those are all of a head's rows, and fit in a tile `heads` times, rows of several heads
// meet each their own head's unit: much of the softmax is waiting for one result before the next, whatever their number.
void meet_unit(const ByteUnit* units, int64_t heads, int64_t dim, const ByteRows& rows, int64_t first, int64_t count,
               const int64_t* hidden, const int64_t* seen, Ahead& ahead);

}  // namespace folio
