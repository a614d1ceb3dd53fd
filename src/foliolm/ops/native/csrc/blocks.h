// Blocks of 32 weights as they are stored, and the rows of 8-bit activations that they meet.
#pragma once

#include <cstdint>

#include "abi.h"
#include "activations.h"
#include "simd.h"
#include "tile.h"

namespace folio {

// Rows of activations in 8 bits as 4-bit weights multiply them. TOGETHER is 0 where each row lies by itself.
template <int TOGETHER>
struct Rows {
    static constexpr int COUNT = TOGETHER ? TOGETHER : 1;
    const int8_t* x;
    const float *scale, *sum;
    int64_t ldx, wides, groups;  // from row to row, where they lie so

    // Rows `first …`, which begin a tile where they lie together.
    Rows(const Activations& all, int64_t first)
        : x(all.s8.x.data() + first * all.padded), scale(all.s8.scale.data() + first * all.wides),
          sum(all.s8.sum.data() + first * all.groups), ldx(all.padded), wides(all.wides), groups(all.groups) {}
    int64_t at(int64_t r) const { return TOGETHER ? SIDE * r : r * ldx; }
    float scale_of(int64_t r) const { return scale[TOGETHER ? r : r * wides]; }
    float sum_of(int64_t r) const { return sum[TOGETHER ? r : r * groups]; }
    void skip_group() { x += GROUP * COUNT, sum += COUNT; }
    void skip_scale() { scale += COUNT; }
};

// A block of weights as they are stored: scales, minima where the format has them, nibbles.
template <bool MINIMA, int AS_ROWS>
struct Stored {
    static constexpr int TOGETHER = AS_ROWS;
    static constexpr int64_t HEAD = MINIMA ? 64 : 32, SIZE = HEAD + 256;

    static vf scale(const uint8_t* w, int v) { return vload_f16(reinterpret_cast<const uint16_t*>(w) + v * LANES); }
    static vf minimum(const uint8_t* w, int v) {
        return MINIMA ? vload_f16(reinterpret_cast<const uint16_t*>(w) + PANEL + v * LANES) : vmul(scale(w, v), vset(-8.0f));
    }

    template <int R>
    [[gnu::always_inline]] static void dots(vi (&dots)[R][NV], const Rows<TOGETHER>& x, const uint8_t* w) {
        const int8_t* from[R];
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) from[r] = TOGETHER ? x.x + x.at(r) : opaque(x.x + x.at(r));
        FOLIO_UNROLL
        for (int t = 0; t < 4; t++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) {
                if (R > 8) in_order();  // fewer rows leave registers for more weights
                vi all = iload(w + HEAD + t * 64 + v * 4 * LANES), low = ilow4(all), high = ihigh4(all);
                FOLIO_UNROLL
                for (int r = 0; r < R; r++) {
                    dots[r][v] = dot4_spread(dots[r][v], low, from[r] + 4 * t);
                    dots[r][v] = dot4_spread(dots[r][v], high, from[r] + 4 * t + SIDE * Rows<TOGETHER>::COUNT);
                }
            }
    }
};

}  // namespace folio
