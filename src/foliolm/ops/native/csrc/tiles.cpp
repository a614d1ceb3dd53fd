#include "tiles.h"

#include <algorithm>

#include "linear.h"

namespace folio {

bool one_order = false;

namespace {

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
inline void write(const Tile<R>& t, float* out, int64_t ldo) {
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) vstore(out + r * ldo + v * LANES, t.v[r][v]);
}

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

// A row's sum times the scale of its activations.
template <int R>
inline void write_scaled(Tile<R>& acc, const float* scale, float* out, int64_t ldo) {
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) acc.v[r][v] = vmul(acc.v[r][v], vset(scale[r]));
    write(acc, out, ldo);
}

// Rows of activations in 8 bits, for 4-bit weights: what is at the first of them.
struct Bytes {
    const int8_t* x;  // [rows, ldx]
    int64_t ldx;
    const float *scale, *sum;  // [rows, groups]
    int64_t groups;
};

// Those, and what they leave of some groups.
struct BytesTwice {
    Bytes main, rest;
    const uint64_t* fine;  // [rows, words] a bit a group
    int64_t words;
};

// The 64 groups from `block` on, a bit each: whether they leave anything in some row.
template <int R>
inline uint64_t any_fine(const BytesTwice& x, int64_t block) {
    uint64_t any = 0;
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) any |= x.fine[r * x.words + block / 64];
    return any;
}

// A block of 4-bit weights, whose scales (and minima) begin at `w`: acc += scale_x · scale · dots + minimum · sum_x.
template <int R, bool MINIMA>
inline void add_block(Tile<R>& acc, const vi (&dots)[R][NV], const uint8_t* w, const Bytes& x, int64_t block) {
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++) {
        vf d = vload_f16(reinterpret_cast<const uint16_t*>(w) + v * LANES);
        vf m = MINIMA ? vload_f16(reinterpret_cast<const uint16_t*>(w) + PANEL + v * LANES) : vmul(d, vset(-8.0f));
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vf scaled = vmul(ifloat(dot4_sums(dots[r][v])), vset(x.scale[r * x.groups + block]));
            acc.v[r][v] = vfma(m, vset(x.sum[r * x.groups + block]), vfma(scaled, d, acc.v[r][v]));
        }
    }
}

// Block `block` of 4-bit weights, at `w`, into acc.
template <int R, bool MINIMA>
inline void nibble_block(Tile<R>& acc, const Bytes& x, int64_t block, const uint8_t* w) {
    constexpr int64_t HEAD = MINIMA ? 64 : 32;
    vi dots[R][NV];
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) dots[r][v] = izero();
    const int8_t* at = x.x + block * GROUP;
    FOLIO_UNROLL
    for (int t = 0; t < 4; t++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vi all = iload(w + HEAD + t * 64 + v * 4 * LANES), low = ilow4(all), high = ihigh4(all);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                dots[r][v] = dot4(dots[r][v], low, ispread4(at + r * x.ldx + 4 * t));
                dots[r][v] = dot4(dots[r][v], high, ispread4(at + r * x.ldx + 4 * t + 16));
            }
        }
    add_block<R, MINIMA>(acc, dots, w, x, block);
}

// 4-bit weights in blocks of 32, as they are stored.
template <int R, bool MINIMA>
void nibbles(const BytesTwice& x, const uint8_t* w, float* out, int64_t ldo) {
    Tile<R> acc;
    clear(acc);
    uint64_t fine = 0;
    for (int64_t b = 0; b < x.main.groups; b++, fine >>= 1, w += (MINIMA ? 64 : 32) + 256) {
        if (b % 64 == 0) fine = any_fine<R>(x, b);
        for (int line = 0; line < 5; line++) __builtin_prefetch(w + AHEAD + 64 * line);
        nibble_block<R, MINIMA>(acc, x.main, b, w);
        if (fine & 1) nibble_block<R, MINIMA>(acc, x.rest, b, w);
    }
    write(acc, out, ldo);
}

// A block of weights at `q`, expanded; scales and minima at `w`, as they are stored.
template <int R, bool MINIMA>
inline void expanded_block(Tile<R>& acc, const Bytes& x, int64_t block, const uint8_t* w, const uint8_t* q) {
    vi dots[R][NV];
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) dots[r][v] = izero();
    const int8_t* at = x.x + block * GROUP;
    FOLIO_UNROLL
    for (int t = 0; t < 8; t++) {
        vi part[NV];
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) part[v] = iload(q + (t * NV + v) * 4 * LANES);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vi four = ispread4(at + r * x.ldx + 4 * t);
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = dot4(dots[r][v], part[v], four);
        }
    }
    add_block<R, MINIMA>(acc, dots, w, x, block);
}

// `nibbles` with the panel's weights expanded: the same sums in the same order. Blocks `ahead` bytes behind the stored ones
// are asked for, where that is not 0.
template <int R, bool MINIMA>
void expanded_nibbles(const BytesTwice& x, const uint8_t* w, const uint8_t* q, int64_t ahead, float* out, int64_t ldo) {
    Tile<R> acc;
    clear(acc);
    uint64_t fine = 0;
    for (int64_t b = 0; b < x.main.groups; b++, fine >>= 1, w += (MINIMA ? 64 : 32) + 256, q += GROUP * PANEL) {
        if (b % 64 == 0) fine = any_fine<R>(x, b);
        for (int line = 0; line < 5 && ahead; line++) __builtin_prefetch(w + ahead + 64 * line);
        expanded_block<R, MINIMA>(acc, x.main, b, w, q);
        if (fine & 1) expanded_block<R, MINIMA>(acc, x.rest, b, w, q);
    }
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
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = izero();
        for (int line = 0; line < 9; line++) __builtin_prefetch(w + AHEAD + 64 * line);
        const int8_t* q = reinterpret_cast<const int8_t*>(w + 32);
        FOLIO_UNROLL
        for (int t = 0; t < 16; t++) {
            vi wide[NV];
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) wide[v] = iwiden8(q + t * 32 + v * 2 * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                vi pair = ispread4(x + r * ldx + b * GROUP + 2 * t);
                FOLIO_UNROLL
                for (int v = 0; v < NV; v++) dots[r][v] = dot2(dots[r][v], wide[v], pair);
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
    vi dots[R][NV];
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) dots[r][v] = izero();
    const int8_t* q = reinterpret_cast<const int8_t*>(w + 4 * PANEL);
    for (int64_t t = 0; t < pairs; t++) {
        __builtin_prefetch(q + t * 32 + AHEAD);
        vi wide[NV];
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) wide[v] = iwiden8(q + t * 32 + v * 2 * LANES);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vi pair = ispread4(x + r * ldx + 2 * t);
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = dot2(dots[r][v], wide[v], pair);
        }
    }
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

BytesTwice bytes_from(const Activations& x, int64_t row) {
    int64_t at = row * x.groups;
    return {{x.s8.data() + row * x.padded, x.padded, x.s8_scale.data() + at, x.s8_sum.data() + at, x.groups},
            {x.rest.data() + row * x.padded, x.padded, x.rest_scale.data() + at, x.rest_sum.data() + at, x.groups},
            x.fine.data() + row * x.words(), x.words()};
}

template <int R>
void nibble_rows(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, float* out) {
    if (weight.format == FOLIO_Q4_0)
        nibbles<R, false>(bytes_from(x, first), weight.data + panel * x.groups * (32 + 256), out, PANEL);
    else
        nibbles<R, true>(bytes_from(x, first), weight.data + panel * x.groups * (64 + 256), out, PANEL);
}

template <int R>
void expanded_rows(const FolioWeight& weight, int64_t panel, const uint8_t* bytes, const Activations& x, int64_t first,
                   int64_t ahead, float* out) {
    const uint8_t* stored = panel_data(weight, panel);
    if (weight.format == FOLIO_Q4_0)
        expanded_nibbles<R, false>(bytes_from(x, first), stored, bytes, ahead, out, PANEL);
    else
        expanded_nibbles<R, true>(bytes_from(x, first), stored, bytes, ahead, out, PANEL);
}

template <int R, class F>
inline void with_rows(int64_t rows, F&& f) {
    if constexpr (R > 0) {
        if (rows == R) return f.template operator()<R>();
        with_rows<R - 1>(rows, f);
    }
}

}  // namespace

const uint8_t* panel_data(const FolioWeight& weight, int64_t panel) {
    return weight.data + panel * packed_bytes(weight.format, PANEL, weight.k);
}

void multiply_stored(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, float* out) {
    if (has_nibbles(weight))
        with_rows<ROWS4>(rows, [&]<int R>() { nibble_rows<R>(weight, panel, x, first, out); });
    else
        with_rows<ROWS>(rows, [&]<int R>() { panel_rows<R>(weight, panel, x, first, out); });
}

void expand(const FolioWeight& weight, int64_t panel, std::vector<uint8_t>& bytes) {
    int64_t groups = (weight.k + GROUP - 1) / GROUP, head = weight.format == FOLIO_Q4_0 ? 32 : 64;
    if (int64_t size = groups * GROUP * PANEL; int64_t(bytes.size()) < size) bytes.resize(size_t(size));
    const uint8_t* w = panel_data(weight, panel);
    uint8_t* out = bytes.data();
    for (int64_t b = 0; b < groups; b++, w += head + 256)
        for (int t = 0; t < 4; t++)
            for (int v = 0; v < NV; v++) {
                vi all = iload(w + head + t * 64 + v * 4 * LANES);
                istore(out + ((b * 8 + t) * NV + v) * 4 * LANES, ilow4(all));
                istore(out + ((b * 8 + 4 + t) * NV + v) * 4 * LANES, ihigh4(all));
            }
}

void multiply_expanded(const FolioWeight& weight, int64_t panel, const uint8_t* bytes, const Activations& x, int64_t first,
                       int64_t rows, bool ahead, float* out) {
    int64_t next = ahead ? packed_bytes(weight.format, PANEL, weight.k) : 0;
    with_rows<ROWS>(rows, [&]<int R>() { expanded_rows<R>(weight, panel, bytes, x, first, next, out); });
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
