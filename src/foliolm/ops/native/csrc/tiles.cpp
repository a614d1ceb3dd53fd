#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "tile.h"

namespace folio {

bool one_order = false;

namespace {

inline vf load(const float* p) { return vload(p); }
inline vf load(const uint16_t* p) { return vload_bf16(p); }

// float32 and bfloat16 weights, [k][ldw].
template <int R, class W>
void floats(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t k, float* out, int64_t ldo, bool accumulate) {
    Tile<R> acc;
    clear(acc);
    if (accumulate)
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) acc.v[r][v] = vload(out + r * ldo + v * LANES);
    if (R == 1 && !one_order) {
        // A single row would wait for its own sums: four chains run side by side.
        Tile<1> more[3];
        for (auto& each : more) clear(each);
        int64_t i = 0;
        for (; i + 4 <= k; i += 4) {
            const W* ahead = w + i * ldw + AHEAD / int64_t(sizeof(W));
            for (int64_t line = 0; line < 4 * PANEL * int64_t(sizeof(W)) / 64; line++)
                __builtin_prefetch(ahead + line * 64 / int64_t(sizeof(W)));
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) {
                acc.v[0][v] = vfma(vset(x[i]), load(w + i * ldw + v * LANES), acc.v[0][v]);
                FOLIO_UNROLL
                for (int c = 0; c < 3; c++)
                    more[c].v[0][v] = vfma(vset(x[i + c + 1]), load(w + (i + c + 1) * ldw + v * LANES), more[c].v[0][v]);
            }
        }
        for (; i < k; i++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) acc.v[0][v] = vfma(vset(x[i]), load(w + i * ldw + v * LANES), acc.v[0][v]);
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++)
            acc.v[0][v] = vadd(vadd(acc.v[0][v], more[0].v[0][v]), vadd(more[1].v[0][v], more[2].v[0][v]));
    } else {
        for (int64_t i = 0; i < k; i++) {
            vf b[NV];
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) b[v] = load(w + i * ldw + v * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                vf a = vset(x[r * ldx + i]);
                FOLIO_UNROLL
                for (int v = 0; v < NV; v++) acc.v[r][v] = vfma(a, b[v], acc.v[r][v]);
            }
        }
    }
    write(acc, out, ldo);
}

#if defined(FOLIO_BF16_PRODUCTS)
// bfloat16 weights, [k][PANEL], and rows: two of k at once.
template <int R>
void pairs(const uint16_t* x, int64_t ldx, const uint16_t* w, int64_t k, float* out, int64_t ldo) {
    Tile<R> acc;
    clear(acc);
    auto add = [&](vi both, int64_t i) __attribute__((always_inline)) {
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) acc.v[r][0] = dot2_bf16_spread(acc.v[r][0], both, x + r * ldx + i);
    };
    int64_t i = 0;
    for (; i + 2 <= k; i += 2) add(interleave2(iload(w + i * PANEL)), i);
    if (i < k) {
        uint16_t last[2 * PANEL] = {};
        std::memcpy(last, w + i * PANEL, sizeof last / 2);
        add(interleave2(iload(last)), i);
    }
    write(acc, out, ldo);
}
#endif

// A row's sum times the scale of its activations.
template <int R>
inline void write_scaled(Tile<R>& acc, const float* scale, float* out, int64_t ldo) {
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) acc.v[r][v] = vmul(acc.v[r][v], vset(scale[r]));
    write(acc, out, ldo);
}

// 8-bit weights in blocks of 32 with a scale each, 16-bit activations.
template <int R>
void bytes_blocks(const int16_t* x, int64_t ldx, const float* scale, int64_t groups, const uint8_t* w, float* out,
                  int64_t ldo) {
    Tile<R> acc;
    clear(acc);
    for (int64_t b = 0; b < groups; b++, w += 32 + 512) {
        vi dots[R][NV];
        clear(dots);
        for (int line = 0; line < 9; line++) __builtin_prefetch(w + AHEAD + 64 * line);
        const int8_t* q = reinterpret_cast<const int8_t*>(w + 32);
        FOLIO_UNROLL
        for (int t = 0; t < 16; t++) {
            vi wide[NV];
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) wide[v] = iwiden8(q + t * 32 + v * 2 * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                const int16_t* pair = x + r * ldx + b * GROUP + 2 * t;
                FOLIO_UNROLL
                for (int v = 0; v < NV; v++) dots[r][v] = dot2_spread(dots[r][v], wide[v], pair);
            }
        }
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vf d = vload_f16(reinterpret_cast<const uint16_t*>(w) + v * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) acc.v[r][v] = vfma(ifloat(dots[r][v]), d, acc.v[r][v]);
        }
    }
    write_scaled(acc, scale, out, ldo);
}

// 8-bit weights with a scale an output, 16-bit activations small enough for a sum of 32 bits over all of k.
template <int R>
void bytes_whole(const int16_t* x, int64_t ldx, const float* scale, int64_t pairs, const uint8_t* w, float* out,
                 int64_t ldo) {
    // Few sums would wait for themselves: pairs take turns in several.
    constexpr int TURNS = R * NV >= 8 ? 1 : R * NV >= 4 ? 2 : 4;
    vi sums[TURNS][R][NV];
    FOLIO_UNROLL
    for (auto& each : sums) clear(each);
    const int8_t* q = reinterpret_cast<const int8_t*>(w + 4 * PANEL);
    auto add = [&](vi(&to)[R][NV], int64_t t) __attribute__((always_inline)) {
        __builtin_prefetch(q + t * 32 + AHEAD);
        vi wide[NV];
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) wide[v] = iwiden8(q + t * 32 + v * 2 * LANES);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            const int16_t* pair = x + r * ldx + 2 * t;
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) to[r][v] = dot2_spread(to[r][v], wide[v], pair);
        }
    };
    int64_t t = 0;
    for (; t + TURNS <= pairs; t += TURNS)
        FOLIO_UNROLL
        for (int turn = 0; turn < TURNS; turn++) add(sums[turn], t + turn);
    for (; t < pairs; t++) add(sums[0], t);
    vi(&dots)[R][NV] = sums[0];
    FOLIO_UNROLL
    for (int turn = 1; turn < TURNS; turn++)
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = iadd(dots[r][v], sums[turn][r][v]);
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vf d = vload(reinterpret_cast<const float*>(w) + v * LANES);
            vstore(out + r * ldo + v * LANES, vmul(ifloat(dots[r][v]), vmul(d, vset(scale[r]))));
        }
}

// Rows `first … first + R` of the product with panel `panel`, into out [R][16].
template <int R>
void panel_rows(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, float* out) {
    int64_t k = weight.k, groups = (k + GROUP - 1) / GROUP;
    switch (weight.format) {
        case FOLIO_F32:
            return floats<R>(x.f32.data() + first * k, k,
                             reinterpret_cast<const float*>(weight.data) + panel * k * PANEL, PANEL, k, out, PANEL,
                             false);
        case FOLIO_BF16:
#if defined(FOLIO_BF16_PRODUCTS)
            if (x.forms.bf16)
                return pairs<R>(x.bf16.data() + first * x.padded, x.padded,
                                reinterpret_cast<const uint16_t*>(weight.data) + panel * k * PANEL, k, out, PANEL);
#endif
            return floats<R>(x.f32.data() + first * k, k,
                             reinterpret_cast<const uint16_t*>(weight.data) + panel * k * PANEL, PANEL, k, out, PANEL,
                             false);
        case FOLIO_I8: {
            int64_t pairs = (k + 1) / 2;
            return bytes_whole<R>(x.rotated.x.data() + first * x.padded, x.padded, x.rotated.scale.data() + first, pairs,
                                  weight.data + panel * (4 * PANEL + pairs * 32), out, PANEL);
        }
        default:
            return bytes_blocks<R>(x.s16.x.data() + first * x.padded, x.padded, x.s16.scale.data() + first, groups,
                                   weight.data + panel * groups * (32 + 512), out, PANEL);
    }
}

}  // namespace

bool in_pairs([[maybe_unused]] int64_t rows) {
#if defined(FOLIO_BF16_PRODUCTS)
    return rows > FEW && !one_order && has_bf16_products();
#else
    return false;
#endif
}

bool in_bytes([[maybe_unused]] int64_t rows) {
#if defined(FOLIO_AVX512)
    return rows > FEW && !one_order;
#else
    return false;
#endif
}

const uint8_t* panel_data(const FolioWeight& weight, int64_t panel) {
    return weight.data + panel * packed_bytes(weight.format, PANEL, weight.k);
}

void multiply_stored(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, bool ahead,
                     float* out) {
    if (has_nibbles(weight) || (weight.format == FOLIO_Q8_0 && !x.forms.s16))
        multiply_nibbles(weight, panel, x, first, rows, ahead, out);
    else
        with_rows<ROWS>(rows, [&]<int R>() { panel_rows<R>(weight, panel, x, first, out); });
}

void small_product(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, int64_t rows, float* out,
                   int64_t ldo, bool accumulate) {
    for (int64_t first = 0; first < rows; first += ROWS)
        with_rows<ROWS>(std::min<int64_t>(ROWS, rows - first), [&]<int R>() {
            floats<R>(x + first * ldx, ldx, w, ldw, k, out + first * ldo, ldo, accumulate);
        });
}

void small_product(const float* x, int64_t ldx, const uint16_t* w, int64_t ldw, int64_t k, int64_t rows, float* out,
                   int64_t ldo, bool accumulate) {
    for (int64_t first = 0; first < rows; first += ROWS)
        with_rows<ROWS>(std::min<int64_t>(ROWS, rows - first), [&]<int R>() {
            floats<R>(x + first * ldx, ldx, w, ldw, k, out + first * ldo, ldo, accumulate);
        });
}

}  // namespace folio
