#include "linear.h"

#include <algorithm>

#include "lora.h"
#include "simd.h"

namespace folio {

bool one_order = false;

namespace {

// Bytes ahead of a product in its weights: what memory answers late is asked for early, into the next panel too.
constexpr int64_t AHEAD = 4096;
// Rows up to which 4-bit weights are multiplied as they are stored.
constexpr int64_t FEW = 12;

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
    if (accumulate) {
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) acc.v[r][v] = vload(out + r * ldo + v * LANES);
    } else {
        clear(acc);
    }
    if (R == 1 && !one_order) {
        // A single row would wait for its own sums: four chains run side by side.
        Tile<1> more[3];
        for (auto& each : more) clear(each);
        int64_t i = 0;
        for (; i + 4 <= k; i += 4) {
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

// A panel of 4-bit weights as bytes, 4 weights of an output side by side: for more than a few rows that costs less than
// to take them apart for each few.
void expand(const uint8_t* w, int64_t head, int64_t groups, uint8_t* out) {
    for (int64_t b = 0; b < groups; b++, w += head + 256)
        for (int t = 0; t < 4; t++)
            for (int v = 0; v < NV; v++) {
                vi all = iload(w + head + t * 64 + v * 4 * LANES);
                istore(out + ((b * 8 + t) * NV + v) * 4 * LANES, ilow4(all));
                istore(out + ((b * 8 + 4 + t) * NV + v) * 4 * LANES, ihigh4(all));
            }
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

// `nibbles` with the panel's weights expanded: the same sums in the same order.
template <int R, bool MINIMA>
void expanded_nibbles(const BytesTwice& x, const uint8_t* w, const uint8_t* q, float* out, int64_t ldo) {
    Tile<R> acc;
    clear(acc);
    uint64_t fine = 0;
    for (int64_t b = 0; b < x.main.groups; b++, fine >>= 1, w += (MINIMA ? 64 : 32) + 256, q += GROUP * PANEL) {
        if (b % 64 == 0) fine = any_fine<R>(x, b);
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

// As many rows a tile as accumulators fit in registers.
#if defined(FOLIO_AVX512)
constexpr int ROWS = 12, ROWS4 = 8;
#elif defined(FOLIO_AVX2)
constexpr int ROWS = 6, ROWS4 = 4;
#else
constexpr int ROWS = 6, ROWS4 = 4;
#endif

template <int R, class F>
inline void with_rows(int64_t rows, F&& f) {
    if constexpr (R > 0) {
        if (rows == R) return f.template operator()<R>();
        with_rows<R - 1>(rows, f);
    }
}

bool has_nibbles(const FolioWeight& weight) { return weight.format == FOLIO_Q4_0 || weight.format == FOLIO_Q4_1; }

int64_t panel_head(const FolioWeight& weight) { return weight.format == FOLIO_Q4_0 ? 32 : 64; }

template <int R>
void expanded_rows(const FolioWeight& weight, const uint8_t* expanded, int64_t panel, const Activations& x, int64_t first,
                   float* out) {
    const uint8_t* stored = weight.data + panel * x.groups * (panel_head(weight) + 256);
    if (weight.format == FOLIO_Q4_0)
        expanded_nibbles<R, false>(bytes_from(x, first), stored, expanded, out, PANEL);
    else
        expanded_nibbles<R, true>(bytes_from(x, first), stored, expanded, out, PANEL);
}

void panel_tile(const FolioWeight& weight, const uint8_t* expanded, int64_t panel, const Activations& x, int64_t first,
                int64_t rows, float* out) {
    if (expanded)
        with_rows<ROWS>(rows, [&]<int R>() { expanded_rows<R>(weight, expanded, panel, x, first, out); });
    else if (has_nibbles(weight))
        with_rows<ROWS4>(rows, [&]<int R>() { nibble_rows<R>(weight, panel, x, first, out); });
    else
        with_rows<ROWS>(rows, [&]<int R>() { panel_rows<R>(weight, panel, x, first, out); });
}

// Where 4-bit weights are expanded: their panel's, in a thread's own memory; else null.
const uint8_t* expanded(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t rows,
                        std::vector<uint8_t>& memory) {
    if (!has_nibbles(weight) || rows <= FEW) return nullptr;
    if (int64_t size = x.padded * PANEL; int64_t(memory.size()) < size) memory.resize(size_t(size));
    int64_t head = panel_head(weight);
    expand(weight.data + panel * x.groups * (head + 256), head, x.groups, memory.data());
    return memory.data();
}

int64_t panels(const FolioWeight& weight) { return (weight.n + PANEL - 1) / PANEL; }

}  // namespace

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

namespace {

// gate = silu(gate + bias) · (up + its bias), rows of a panel; `width` of their columns are outputs.
void gate(float* gate, float* up, const float* bias, const float* up_bias, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, gate += PANEL, up += PANEL) {
        if (bias)
            for (int64_t c = 0; c < width; c++) gate[c] += bias[c], up[c] += up_bias[c];
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++)
            vstore(gate + v * LANES, vmul(vsilu(vload(gate + v * LANES)), vload(up + v * LANES)));
    }
}

void write_tile(float* from, const float* bias, int64_t rows, int64_t width, float* to, int64_t ldo, bool add) {
    for (int64_t r = 0; r < rows; r++, from += PANEL, to += ldo) {
        if (bias)
            for (int64_t c = 0; c < width; c++) from[c] += bias[c];
        if (width < PANEL) {
            for (int64_t c = 0; c < width; c++) to[c] = add ? to[c] + from[c] : from[c];
            continue;
        }
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vf own = vload(from + v * LANES);
            vstore(to + v * LANES, add ? vadd(vload(to + v * LANES), own) : own);
        }
    }
}

}  // namespace

void linear(Team& team, const FolioLinear& linear, const Activations& x, int64_t rows, float* y, int64_t ldy, Into into,
            LoraAddition lora) {
    int64_t total = 0;
    int64_t parts = into == Into::silu_mul ? 1 : linear.num_parts;
    for (int64_t i = 0; i < parts; i++) total += panels(linear.parts[i]);
    // Weights come from memory once: with few rows a thread takes runs of panels, with many it goes through all rows
    // a few panels at a time, so that both stay in its cache.
    int64_t chunk = rows <= 16 ? std::max<int64_t>(1, total / (team.size() * 6)) : 2;
    constexpr int64_t BLOCK = 240;
    thread_local std::vector<uint8_t> memory[2];
    alignas(64) float tile[2][ROWS * PANEL];
    int64_t begin, end;
    while (team.take(total, chunk, begin, end)) {
        for (int64_t block = 0; block < rows; block += BLOCK) {
            int64_t stop = std::min(block + BLOCK, rows);
            for (int64_t unit = begin; unit < end; unit++) {
                int64_t part = 0, panel = unit, column = 0;
                while (panel >= panels(linear.parts[part])) {
                    panel -= panels(linear.parts[part]);
                    column += linear.parts[part].n;
                    part++;
                }
                const FolioWeight& weight = linear.parts[part];
                int64_t width = std::min<int64_t>(PANEL, weight.n - panel * PANEL);
                column += panel * PANEL;
                int64_t step = has_nibbles(weight) && rows <= FEW ? ROWS4 : ROWS;
                const uint8_t* own = expanded(weight, panel, x, rows, memory[0]);
                const uint8_t* own_up = into == Into::silu_mul ? expanded(linear.parts[1], panel, x, rows, memory[1]) : nullptr;
                for (int64_t row = block; row < stop; row += step) {
                    int64_t count = std::min(step, stop - row);
                    for (int64_t r = 0; r < count; r++) __builtin_prefetch(y + (row + r) * ldy + column, 1);
                    panel_tile(weight, own, panel, x, row, count, tile[0]);
                    if (lora.rows) lora.rows->expand(lora.index, part, panel, row, count, tile[0]);
                    const float* bias = linear.bias ? linear.bias + column : nullptr;
                    if (into == Into::silu_mul) {
                        int64_t few = has_nibbles(linear.parts[1]) && rows <= FEW ? ROWS4 : ROWS;
                        for (int64_t r = 0; r < count; r += few)
                            panel_tile(linear.parts[1], own_up, panel, x, row + r, std::min<int64_t>(few, count - r),
                                       tile[1] + r * PANEL);
                        if (lora.rows) lora.rows->expand(lora.index, 1, panel, row, count, tile[1]);
                        gate(tile[0], tile[1], bias, bias ? bias + weight.n : nullptr, count, width);
                        bias = nullptr;
                    }
                    write_tile(tile[0], bias, count, width, y + row * ldy + column, ldy, into == Into::add);
                }
            }
        }
    }
}

}  // namespace folio
