#include "linear.h"

#include <algorithm>
#include <cmath>

#include "lora.h"
#include "simd.h"

namespace folio {
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
    if constexpr (R == 1) {
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

// A block of 4-bit weights, whose scales (and minima) begin at `w`: acc += scale · dots + minimum · sum.
template <int R, bool MINIMA>
inline void add_block(Tile<R>& acc, const vi (&dots)[R][NV], const uint8_t* w, const float* sum, int64_t groups) {
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++) {
        vf d = vload_f16(reinterpret_cast<const uint16_t*>(w) + v * LANES);
        vf m = MINIMA ? vload_f16(reinterpret_cast<const uint16_t*>(w) + PANEL + v * LANES) : vmul(d, vset(-8.0f));
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            acc.v[r][v] = vfma(ifloat(dots[r][v]), d, acc.v[r][v]);
            acc.v[r][v] = vfma(m, vset(sum[r * groups]), acc.v[r][v]);
        }
    }
}

// 4-bit weights in blocks of 32: scale_x · Σ_blocks (scale · (q · x) + minimum · sum_x). Of each four activations the
// second and the third have changed places: so do the nibbles when every fourth is taken.
template <int R, bool MINIMA>
void nibbles(const int16_t* x, int64_t ldx, const float* scale, const float* sum, int64_t groups, const uint8_t* w,
             float* out, int64_t ldo) {
    constexpr int64_t HEAD = MINIMA ? 64 : 32;
    Tile<R> acc;
    clear(acc);
    for (int64_t b = 0; b < groups; b++, w += HEAD + 256) {
        vi dots[R][NV];
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = izero();
        for (int line = 0; line < 5; line++) __builtin_prefetch(w + AHEAD + 64 * line);
        const int16_t* at = x + b * GROUP;
        FOLIO_UNROLL
        for (int t = 0; t < 4; t++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) {
                vi all = iload(w + HEAD + t * 64 + v * 4 * LANES);
                vi low = inibbles<0>(all), high = inibbles<1>(all), odd_low = inibbles<2>(all), odd_high = inibbles<3>(all);
                FOLIO_UNROLL
                for (int r = 0; r < R; r++) {
                    const int16_t* here = at + r * ldx + 4 * t;
                    dots[r][v] = dot2(dots[r][v], low, ispread4(here));
                    dots[r][v] = dot2(dots[r][v], odd_low, ispread4(here + 2));
                    dots[r][v] = dot2(dots[r][v], high, ispread4(here + 16));
                    dots[r][v] = dot2(dots[r][v], odd_high, ispread4(here + 18));
                }
            }
        add_block<R, MINIMA>(acc, dots, w, sum + b, groups);
    }
    write_scaled(acc, scale, out, ldo);
}

// A panel of 4-bit weights as 16-bit integers, in the order in which `nibbles` takes them out: for more than a few rows
// that costs less than to do it for each few.
void expand(const uint8_t* w, int64_t head, int64_t groups, int16_t* out) {
    for (int64_t b = 0; b < groups; b++, w += head + 256)
        for (int t = 0; t < 4; t++)
            for (int v = 0; v < NV; v++) {
                vi all = iload(w + head + t * 64 + v * 4 * LANES);
                int16_t* to = out + ((b * 16 + t * 4) * NV + v) * 2 * LANES;
                istore(to, inibbles<0>(all));
                istore(to + 2 * PANEL, inibbles<2>(all));
                istore(to + 4 * PANEL, inibbles<1>(all));
                istore(to + 6 * PANEL, inibbles<3>(all));
            }
}

// `nibbles` with the panel's weights expanded; scales and minima are read where they are stored.
template <int R, bool MINIMA>
void shorts(const int16_t* x, int64_t ldx, const float* scale, const float* sum, int64_t groups, const uint8_t* w,
            const int16_t* q, float* out, int64_t ldo) {
    constexpr int64_t HEAD = MINIMA ? 64 : 32;
    Tile<R> acc;
    clear(acc);
    for (int64_t b = 0; b < groups; b++, w += HEAD + 256, x += GROUP) {
        vi dots[R][NV];
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = izero();
        FOLIO_UNROLL
        for (int t = 0; t < 16; t++, q += 2 * PANEL) {
            vi part[NV];
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) part[v] = iload(q + v * 2 * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                vi pair = ispread4(x + r * ldx + t / 4 * 4 + t % 4 / 2 * 16 + t % 2 * 2);
                FOLIO_UNROLL
                for (int v = 0; v < NV; v++) dots[r][v] = dot2(dots[r][v], part[v], pair);
            }
        }
        add_block<R, MINIMA>(acc, dots, w, sum + b, groups);
    }
    write_scaled(acc, scale, out, ldo);
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
            return bytes_whole<R>(x.s16.data() + first * x.padded, x.padded, x.s16_scale.data() + first, pairs,
                                  weight.data + panel * (4 * PANEL + pairs * 32), out, PANEL);
        }
        default:
            return bytes_blocks<R>(x.s16.data() + first * x.padded, x.padded, x.s16_scale.data() + first, groups,
                                   weight.data + panel * groups * (32 + 512), out, PANEL);
    }
}

template <int R>
void nibble_rows(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, float* out) {
    int64_t groups = x.groups;
    const int16_t* from = x.pairs.data() + first * x.padded;
    const float *scale = x.pairs_scale.data() + first, *sum = x.pairs_sum.data() + first * groups;
    if (weight.format == FOLIO_Q4_0)
        nibbles<R, false>(from, x.padded, scale, sum, groups, weight.data + panel * groups * (32 + 256), out, PANEL);
    else
        nibbles<R, true>(from, x.padded, scale, sum, groups, weight.data + panel * groups * (64 + 256), out, PANEL);
}

// As many rows a tile as accumulators fit in registers.
#if defined(FOLIO_AVX512)
constexpr int ROWS = 12, ROWS4 = 8;
#elif defined(FOLIO_AVX2)
constexpr int ROWS = 6, ROWS4 = 4;
#else
constexpr int ROWS = 4, ROWS4 = 4;
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
void expanded_rows(const FolioWeight& weight, const int16_t* expanded, int64_t panel, const Activations& x, int64_t first,
                   float* out) {
    int64_t groups = x.groups;
    const int16_t* from = x.pairs.data() + first * x.padded;
    const float *scale = x.pairs_scale.data() + first, *sum = x.pairs_sum.data() + first * groups;
    const uint8_t* stored = weight.data + panel * groups * (panel_head(weight) + 256);
    if (weight.format == FOLIO_Q4_0)
        shorts<R, false>(from, x.padded, scale, sum, groups, stored, expanded, out, PANEL);
    else
        shorts<R, true>(from, x.padded, scale, sum, groups, stored, expanded, out, PANEL);
}

void panel_tile(const FolioWeight& weight, const int16_t* expanded, int64_t panel, const Activations& x, int64_t first,
                int64_t rows, float* out) {
    if (expanded)
        with_rows<ROWS>(rows, [&]<int R>() { expanded_rows<R>(weight, expanded, panel, x, first, out); });
    else if (has_nibbles(weight))
        with_rows<ROWS4>(rows, [&]<int R>() { nibble_rows<R>(weight, panel, x, first, out); });
    else
        with_rows<ROWS>(rows, [&]<int R>() { panel_rows<R>(weight, panel, x, first, out); });
}

// Where 4-bit weights are expanded: their panel's, in a thread's own memory; else null.
const int16_t* expanded(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t rows,
                        std::vector<int16_t>& memory) {
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

Forms forms_of(const FolioLinear& linear) {
    Forms forms;
    for (int64_t i = 0; i < linear.num_parts; i++) {
        int64_t format = linear.parts[i].format;
        if (format == FOLIO_F32 || format == FOLIO_BF16) forms.f32 = true;
        if (format == FOLIO_I8 || format == FOLIO_Q8_0) forms.s16 = true;
        if (format == FOLIO_Q4_0 || format == FOLIO_Q4_1) forms.pairs = true;
    }
    return forms;
}

void Activations::shape(const FolioLinear& linear, int64_t rows, bool floats) {
    k = linear.parts[0].k;
    groups = (k + GROUP - 1) / GROUP;
    padded = groups * GROUP;
    forms = forms_of(linear);
    if (floats) forms.f32 = true;
    auto grow = [](auto& vector, int64_t size) {
        if (int64_t(vector.size()) < size) vector.resize(size_t(size));
    };
    if (forms.f32) grow(f32, rows * k);
    if (forms.pairs) {
        grow(pairs, rows * padded);
        grow(pairs_scale, rows);
        grow(pairs_sum, rows * groups);
    }
    if (forms.s16) {
        grow(s16, rows * padded);
        grow(s16_scale, rows);
        // The sum of k products with weights of at most 127 must fit in 32 bits.
        s16_top = std::min<int64_t>(32767, ((int64_t(1) << 31) - 1) / (127 * padded));
    }
}

void Activations::set(int64_t row, const float* x) {
    if (forms.f32) std::memcpy(f32.data() + row * k, x, size_t(k) * 4);
    if (!forms.s16 && !forms.pairs) return;
    float top = 0;
    int64_t i = 0;
    vf tops = vzero();
    for (; i + LANES <= k; i += LANES) tops = vmax(tops, vabs(vload(x + i)));
    top = vtop(tops);
    for (; i < k; i++) top = std::max(top, std::fabs(x[i]));
    auto round_to = [&](float limit, int16_t* to) {
        vf factor = vset(top > 0 ? limit / top : 0.0f);
        float last[LANES] = {};
        int64_t j = 0;
        for (; j + LANES <= k; j += LANES) vstore_s16(to + j, vround(vmul(vload(x + j), factor)));
        std::memcpy(last, x + j, size_t(k - j) * 4);
        for (; j < padded; j += LANES) {
            vstore_s16(to + j, vround(vmul(vload(last), factor)));
            std::memset(last, 0, sizeof last);
        }
    };
    if (forms.s16) {
        round_to(float(s16_top), s16.data() + row * padded);
        s16_scale[size_t(row)] = top / float(s16_top);
    }
    if (forms.pairs) {
        int16_t* to = pairs.data() + row * padded;
        round_to(32767.0f, to);
        float scale = top / 32767.0f;
        pairs_scale[size_t(row)] = scale;
        for (int64_t g = 0; g < groups; g++, to += GROUP) {
            int sum = 0;
            for (int j = 0; j < GROUP; j++) sum += to[j];
            for (int j = 0; j < GROUP; j += 4) std::swap(to[j + 1], to[j + 2]);
            pairs_sum[size_t(row * groups + g)] = float(sum);
        }
    }
}

void linear(Team& team, const FolioLinear& linear, const Activations& x, int64_t rows, float* y, int64_t ldy, Into into,
            LoraAddition lora) {
    int64_t total = 0;
    int64_t parts = into == Into::silu_mul ? 1 : linear.num_parts;
    for (int64_t i = 0; i < parts; i++) total += panels(linear.parts[i]);
    // Weights come from memory once: with few rows a thread takes runs of panels, with many it goes through all rows
    // a few panels at a time, so that both stay in its cache.
    int64_t chunk = rows <= 16 ? std::max<int64_t>(1, total / (team.size() * 6)) : 2;
    constexpr int64_t BLOCK = 240;
    thread_local std::vector<int16_t> memory[2];
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
                const int16_t* own = expanded(weight, panel, x, rows, memory[0]);
                const int16_t* own_up = into == Into::silu_mul ? expanded(linear.parts[1], panel, x, rows, memory[1]) : nullptr;
                for (int64_t row = block; row < stop; row += step) {
                    int64_t count = std::min(step, stop - row);
                    panel_tile(weight, own, panel, x, row, count, tile[0]);
                    if (lora.rows) lora.rows->expand(lora.index, part, panel, row, count, tile[0]);
                    const float* bias = linear.bias ? linear.bias + column : nullptr;
                    if (into == Into::silu_mul) {
                        int64_t few = has_nibbles(linear.parts[1]) && rows <= FEW ? ROWS4 : ROWS;
                        for (int64_t r = 0; r < count; r += few)
                            panel_tile(linear.parts[1], own_up, panel, x, row + r, std::min<int64_t>(few, count - r),
                                       tile[1] + r * PANEL);
                        if (lora.rows) lora.rows->expand(lora.index, 1, panel, row, count, tile[1]);
                        const float* up_bias = bias ? bias + weight.n : nullptr;
                        for (int64_t r = 0; r < count; r++) {
                            float *gate = tile[0] + r * PANEL, *up = tile[1] + r * PANEL, *to = y + (row + r) * ldy + column;
                            if (bias)
                                for (int64_t c = 0; c < width; c++) gate[c] += bias[c], up[c] += up_bias[c];
                            FOLIO_UNROLL
                            for (int v = 0; v < NV; v++)
                                vstore(gate + v * LANES, vmul(vsilu(vload(gate + v * LANES)), vload(up + v * LANES)));
                            std::memcpy(to, gate, size_t(width) * 4);
                        }
                        continue;
                    }
                    for (int64_t r = 0; r < count; r++) {
                        float *from = tile[0] + r * PANEL, *to = y + (row + r) * ldy + column;
                        if (bias)
                            for (int64_t c = 0; c < width; c++) from[c] += bias[c];
                        if (into == Into::add)
                            for (int64_t c = 0; c < width; c++) to[c] += from[c];
                        else
                            std::memcpy(to, from, size_t(width) * 4);
                    }
                }
            }
        }
    }
}

}  // namespace folio
