#include "rotation.h"

#include <cmath>

#include "simd.h"

namespace folio {
namespace {

// Butterflies H apart, and those of all larger distances.
template <int COUNT, int H, class T>
inline void butterflies(T (&v)[COUNT]) {
    if constexpr (H < COUNT) {
        FOLIO_UNROLL
        for (int pair = 0; pair < COUNT / 2; pair++) {
            int i = pair / H * 2 * H + pair % H;
            T sum = v[i] + v[i + H], difference = v[i] - v[i + H];
            v[i] = sum, v[i + H] = difference;
        }
        butterflies<COUNT, 2 * H>(v);
    }
}

// A block of SIZE: within vectors first, then across them, which on every target is the same sums in the same order.
template <int SIZE>
inline void block(const float* x, float* out, float scale) {
    scale *= 1.0f / std::sqrt(float(SIZE));
    if constexpr (SIZE >= LANES) {
        constexpr int COUNT = SIZE / LANES;
        vf v[COUNT];
        FOLIO_UNROLL
        for (int i = 0; i < COUNT; i++) v[i] = vhadamard(vload(x + i * LANES));
        butterflies<COUNT, 1>(v);
        FOLIO_UNROLL
        for (int i = 0; i < COUNT; i++) vstore(out + i * LANES, vmul(v[i], vset(scale)));
    } else {
        float v[SIZE];
        for (int i = 0; i < SIZE; i++) v[i] = x[i];
        butterflies<SIZE, 1>(v);
        for (int i = 0; i < SIZE; i++) out[i] = v[i] * scale;
    }
}

// The blocks of what is left, each power of two at most once.
template <int SIZE>
void rest(const float* x, int64_t k, float* out, float scale) {
    if constexpr (SIZE > 0) {
        if (k >= SIZE) {
            block<SIZE>(x, out, scale);
            x += SIZE, out += SIZE, k -= SIZE;
        }
        rest<SIZE / 2>(x, k, out, scale);
    }
}

}  // namespace

void hadamard(const float* x, int64_t k, float* out, float scale) {
    int64_t i = 0;
    for (; i + 64 <= k; i += 64) block<64>(x + i, out + i, scale);
    if (i < k) rest<32>(x + i, k - i, out + i, scale);
}

}  // namespace folio
