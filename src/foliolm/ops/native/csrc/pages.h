// Keys and values of one layer where they lie: blocks of a pool.
#pragma once

#include <cstdint>

#include "abi.h"
#include "simd.h"

namespace folio {

// Vectors in 8 bits are turned (see rotation.h) before they are rounded: keys as well as values have dimensions that stand
// out. Queries are turned to meet such keys, and what came of the values is turned back.
//
// Attention multiplies bytes of PANEL tokens at once. Where blocks and heads consist of whole panels, they are stored so
// (KV_PANEL below): a decode, which uses a key three times or so, would take longer to bring it into that order than to
// use it. A panel takes as many bytes as its tokens' rows would.
struct Pages {
    uint8_t *keys, *values;
    int64_t block_size, kv_heads, head_dim, format;

    int64_t row_bytes() const {
        return head_dim * (format == FOLIO_KV_F32 ? 4 : format == FOLIO_KV_BF16 ? 2 : 1) + (format == FOLIO_KV_I8 ? 4 : 0);
    }
    bool in_panels() const { return format == FOLIO_KV_I8 && head_dim % PANEL == 0 && block_size % PANEL == 0; }

    // Tokens of a head that lie together, and their bytes; those of the next head follow.
    int64_t run() const { return in_panels() ? PANEL : 1; }
    int64_t run_bytes() const { return run() * row_bytes(); }

    // Where the run of a head begins that `slot` belongs to.
    int64_t offset(int64_t slot, int64_t head) const { return (slot / run() * kv_heads + head) * run_bytes(); }

    // Stores one head's key and value of a token, [head_dim] each.
    void write(int64_t slot, int64_t head, const float* key, const float* value) const;
};

// Within a panel of PANEL tokens of one head, [head_dim] bytes each: four of what is summed side by side, then the tokens'
// float scales. Keys [head_dim / 4][PANEL][4], values [head_dim / PANEL][PANEL / 4][PANEL][4].
constexpr int64_t QUAD = 4 * PANEL;
inline int64_t key_place(int64_t token, int64_t i) { return i / 4 * QUAD + token * 4 + i % 4; }
inline int64_t value_place(int64_t token, int64_t i) { return (i / PANEL * (PANEL / 4) + token / 4) * QUAD + i % PANEL * 4 + token % 4; }

}  // namespace folio
