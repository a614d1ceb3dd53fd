// Products with 4-bit weights in blocks of 32: as they are stored, and expanded for many rows.
#include "nibbles.h"

#include "tile.h"
#include "tiles.h"

namespace folio {
namespace {

// The 64 groups from `block` on, a bit each: whether 8 bits leave anything of them in some row.
template <int R>
inline uint64_t any_fine(const uint64_t* fine, int64_t words, int64_t block) {
    uint64_t any = 0;
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) any |= fine[r * words + block / 64];
    return any;
}

// Rows of activations in 8 bits as 4-bit weights multiply them: a group's bytes, and its rows' scales and sums.
// TOGETHER is 0 where each row lies by itself.
template <int TOGETHER>
struct GroupRows {
    const int8_t* x;
    const float *scale, *sum;
    int64_t ldx, groups;  // from row to row, where they lie so

    int64_t row(int r) const { return TOGETHER ? 4 * r : r * ldx; }
    int64_t group(int r) const { return TOGETHER ? r : r * groups; }
    void skip(int64_t count) {
        constexpr int SIDE = TOGETHER ? TOGETHER : 1;
        x += count * GROUP * SIDE, scale += count * SIDE, sum += count * SIDE;
    }
};

// Rows `first …`, which begin a tile where they lie together.
template <int TOGETHER>
inline GroupRows<TOGETHER> rows_from(const Activations& x, const Bytes& bytes, int64_t first) {
    int64_t group = first * x.groups;
    return {bytes.x.data() + first * x.padded, bytes.scale.data() + group, bytes.sum.data() + group, x.padded, x.groups};
}

// acc += scale_x · scale · dots + minimum · sum_x. One operation for all sums, then the next: so there are registers for them
// all, and none waits for the one before.
template <int R, int TOGETHER>
[[gnu::always_inline]] inline void add_scaled(Tile<R>& acc, vi (&dots)[R][NV], const vf (&scale)[NV],
                                              const vf (&minimum)[NV], const GroupRows<TOGETHER>& x) {
    vf sums[R][NV];
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) dots[r][v] = keep(dot4_sums(dots[r][v]));
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) sums[r][v] = keep(ifloat(dots[r][v]));
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) {
        vf scale_x = vset(x.scale[x.group(r)]);
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) sums[r][v] = keep(vmul(sums[r][v], scale_x));
    }
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++)
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) sums[r][v] = keep(vfma(sums[r][v], scale[v], acc.v[r][v]));
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) {
        vf sum_x = vset(x.sum[x.group(r)]);
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) acc.v[r][v] = vfma(sum_x, minimum[v], sums[r][v]);
    }
}

// Scales and minima of a block of 4-bit weights as they are stored.
inline vf stored_scale(const uint8_t* w, int v) {
    return vload_f16(reinterpret_cast<const uint16_t*>(w) + v * LANES);
}
template <bool MINIMA>
inline vf stored_minimum(const uint8_t* w, int v, vf scale) {
    return MINIMA ? vload_f16(reinterpret_cast<const uint16_t*>(w) + PANEL + v * LANES) : vmul(scale, vset(-8.0f));
}

// A block of 4-bit weights, at `w`, into acc.
template <int R, bool MINIMA>
[[gnu::always_inline]] inline void nibble_block(Tile<R>& acc, const GroupRows<0>& x, const uint8_t* w) {
    constexpr int64_t HEAD = MINIMA ? 64 : 32;
    vi dots[R][NV];
    clear(dots);
    FOLIO_UNROLL
    for (int t = 0; t < 4; t++)
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vi all = iload(w + HEAD + t * 64 + v * 4 * LANES), low = ilow4(all), high = ihigh4(all);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                dots[r][v] = dot4(dots[r][v], low, ispread4(x.x + x.row(r) + 4 * t));
                dots[r][v] = dot4(dots[r][v], high, ispread4(x.x + x.row(r) + 4 * t + 16));
            }
        }
    vf scale[NV], minimum[NV];
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++) scale[v] = stored_scale(w, v), minimum[v] = stored_minimum<MINIMA>(w, v, scale[v]);
    add_scaled(acc, dots, scale, minimum, x);
}

// What 8 bits leave, added: few groups need it. By value, or all sums would have to lie in memory all the time.
template <int R, bool MINIMA>
[[gnu::noinline]] Tile<R> with_rest_stored(Tile<R> acc, const Activations& all, int64_t first, int64_t block, const uint8_t* w) {
    auto x = rows_from<0>(all, all.rest, first);
    x.skip(block);
    nibble_block<R, MINIMA>(acc, x, w);
    return acc;
}

// 4-bit weights in blocks of 32, as they are stored.
template <int R, bool MINIMA>
void nibbles(const Activations& all, int64_t first, const uint8_t* w, float* out) {
    auto x = rows_from<0>(all, all.s8, first);
    const uint64_t* fine = all.fine.data() + first * all.words();
    Tile<R> acc;
    clear(acc);
    uint64_t any = 0;
    int64_t words = all.words();
    for (int64_t b = 0; b < all.groups; b++, any >>= 1, w += (MINIMA ? 64 : 32) + 256, x.skip(1)) {
        if (b % 64 == 0) any = any_fine<R>(fine, words, b);
        for (int line = 0; line < 5; line++) __builtin_prefetch(w + AHEAD + 64 * line);
        nibble_block<R, MINIMA>(acc, x, w);
        if (any & 1) acc = with_rest_stored<R, MINIMA>(acc, all, first, b, w);
    }
    write(acc, out, PANEL);
}

// A block of expanded weights: scales and minima as floats, then a byte a weight.
constexpr int64_t EXPANDED_HEAD = 2 * 4 * PANEL, EXPANDED = EXPANDED_HEAD + GROUP * PANEL;

template <int R>
[[gnu::always_inline]] inline void expanded_block(Tile<R>& acc, const GroupRows<ROWS>& x, const uint8_t* w) {
    vi dots[R][NV];
    clear(dots);
    FOLIO_UNROLL
    for (int t = 0; t < 8; t++) {
        vi part[NV];
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) part[v] = iload(w + EXPANDED_HEAD + (t * NV + v) * 4 * LANES);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vi four = ispread4(x.x + 4 * ROWS * t + x.row(r));
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) dots[r][v] = dot4(dots[r][v], part[v], four);
        }
    }
    const float* head = reinterpret_cast<const float*>(w);
    vf scale[NV], minimum[NV];
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++) scale[v] = vload(head + v * LANES), minimum[v] = vload(head + PANEL + v * LANES);
    add_scaled(acc, dots, scale, minimum, x);
}

// As `with_rest_stored`.
template <int R>
[[gnu::noinline]] Tile<R> with_rest(Tile<R> acc, const Activations& all, int64_t first, int64_t block, const uint8_t* w) {
    auto x = rows_from<ROWS>(all, all.rest, first);
    x.skip(block);
    expanded_block<R>(acc, x, w);
    return acc;
}

// `nibbles` with the panel's weights expanded: the same sums in the same order. The next panel's, as they are stored, are
// asked for: `step` bytes a block from `ahead` on.
template <int R>
[[gnu::noinline]] void expanded_nibbles(const Activations& all, int64_t first, const uint8_t* w, const uint8_t* ahead,
                                        int64_t step, float* out) {
    auto x = rows_from<ROWS>(all, all.s8, first);
    const uint64_t* fine = all.fine.data() + first * all.words();
    Tile<R> acc;
    clear(acc);
    uint64_t any = 0;
    int64_t words = all.words();
    for (int64_t b = 0; b < all.groups; b++, any >>= 1, w += EXPANDED, x.skip(1)) {
        if (b % 64 == 0) any = any_fine<R>(fine, words, b);
        for (int line = 0; line < 5 && ahead; line++) __builtin_prefetch(ahead + b * step + 64 * line);
        expanded_block<R>(acc, x, w);
        if (any & 1) acc = with_rest<R>(acc, all, first, b, w);
    }
    write(acc, out, PANEL);
}

template <int R>
void nibble_rows(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, float* out) {
    const uint8_t* w = panel_data(weight, panel);
    weight.format == FOLIO_Q4_0 ? nibbles<R, false>(x, first, w, out) : nibbles<R, true>(x, first, w, out);
}

// A panel's blocks as floats of their scales and minima, and bytes.
template <bool MINIMA>
void expand_blocks(const uint8_t* w, int64_t blocks, uint8_t* out) {
    constexpr int64_t HEAD = MINIMA ? 64 : 32;
    for (int64_t b = 0; b < blocks; b++, w += HEAD + 256, out += EXPANDED) {
        float* head = reinterpret_cast<float*>(out);
        for (int v = 0; v < NV; v++) {
            vf scale = stored_scale(w, v);
            vstore(head + v * LANES, scale), vstore(head + PANEL + v * LANES, stored_minimum<MINIMA>(w, v, scale));
        }
        for (int t = 0; t < 4; t++)
            for (int v = 0; v < NV; v++) {
                vi all = iload(w + HEAD + t * 64 + v * 4 * LANES);
                istore(out + EXPANDED_HEAD + (t * NV + v) * 4 * LANES, ilow4(all));
                istore(out + EXPANDED_HEAD + ((4 + t) * NV + v) * 4 * LANES, ihigh4(all));
            }
    }
}

}  // namespace

void multiply_nibbles(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, float* out) {
    with_rows<ROWS4>(rows, [&]<int R>() { nibble_rows<R>(weight, panel, x, first, out); });
}

void expand(const FolioWeight& weight, int64_t panel, std::vector<uint8_t>& expanded) {
    int64_t blocks = (weight.k + GROUP - 1) / GROUP;
    if (int64_t size = blocks * EXPANDED; int64_t(expanded.size()) < size) expanded.resize(size_t(size));
    auto* made = weight.format == FOLIO_Q4_0 ? expand_blocks<false> : expand_blocks<true>;
    made(panel_data(weight, panel), blocks, expanded.data());
}

void multiply_expanded(const FolioWeight& weight, int64_t panel, const uint8_t* expanded, const Activations& x, int64_t first,
                       int64_t rows, bool ahead, float* out) {
    const uint8_t* next = ahead ? panel_data(weight, panel + 1) : nullptr;
    int64_t step = weight.format == FOLIO_Q4_0 ? 32 + 256 : 64 + 256;
    with_rows<ROWS>(rows, [&]<int R>() { expanded_nibbles<R>(x, first, expanded, next, step, out); });
}

}  // namespace folio
