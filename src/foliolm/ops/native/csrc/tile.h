// The sums of a few rows with a panel of weights, while they are made.
#pragma once

#include <cstdint>

#include "simd.h"

namespace folio {

// Bytes ahead of a product in its weights: what memory answers late is asked for early, into the next panel too.
constexpr int64_t AHEAD = 4096;

template <int R>
struct Tile {
    vf v[R][NV];
};

template <int R>
inline void clear(Tile<R>& t) {
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) t.v[r][v] = vzero();
}

template <int R>
inline void clear(vi (&dots)[R][NV]) {
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) dots[r][v] = izero();
}

template <int R>
inline void write(const Tile<R>& t, float* out, int64_t ldo) {
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) vstore(out + r * ldo + v * LANES, t.v[r][v]);
}

template <int R, class F>
inline void with_rows(int64_t rows, F&& f) {
    if constexpr (R > 0) {
        if (rows == R) return f.template operator()<R>();
        with_rows<R - 1>(rows, f);
    }
}

}  // namespace folio
