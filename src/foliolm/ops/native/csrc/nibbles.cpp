// Products of weights in blocks of 32 with 8-bit activations: as they are stored, and 4-bit ones expanded for many rows.
#include "nibbles.h"

#include <algorithm>

#include "blocks.h"
#include "linear.h"
#include "outliers.h"
#include "tile.h"
#include "tiles.h"

namespace folio {
namespace {

// acc += scale · dots + minimum · sum_x. One operation for all sums, then the next: so there are registers for them all, and
// none waits for the one before.
template <int R, int TOGETHER>
[[gnu::always_inline]] inline void add_scaled(Tile<R>& acc, vi (&dots)[R][NV], const vf (&scale)[NV],
                                              const vf (&minimum)[NV], const Rows<TOGETHER>& x) {
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
    for (int v = 0; v < NV; v++)
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) acc.v[r][v] = keep(vfma(sums[r][v], scale[v], acc.v[r][v]));
    FOLIO_UNROLL
    for (int r = 0; r < R; r++) {
        vf sum_x = vset(x.sum_of(r));
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) acc.v[r][v] = vfma(sum_x, minimum[v], acc.v[r][v]);
    }
}

// A block of expanded weights: scales and minima as floats, then a byte a weight. The rows of a tile lie together.
struct Expanded {
    static constexpr int TOGETHER = ROWS;
    static constexpr int64_t HEAD = 2 * 4 * PANEL, SIZE = HEAD + GROUP * PANEL;

    static vf scale(const uint8_t* w, int v) { return vload(reinterpret_cast<const float*>(w) + v * LANES); }
    static vf minimum(const uint8_t* w, int v) { return vload(reinterpret_cast<const float*>(w) + PANEL + v * LANES); }

    template <int R>
    [[gnu::always_inline]] static void dots(vi (&dots)[R][NV], const Rows<ROWS>& x, const uint8_t* w) {
        FOLIO_UNROLL
        for (int t = 0; t < 8; t++) {
            vi part[NV];
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) part[v] = iload(w + HEAD + (t * NV + v) * 4 * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                vi four = ispread4(x.x + t / 4 * SIDE * ROWS + x.at(r) + t % 4 * 4);
                FOLIO_UNROLL
                for (int v = 0; v < NV; v++) dots[r][v] = dot4(dots[r][v], part[v], four);
            }
        }
    }
};

#if defined(FOLIO_AVX512)
// A block of 8-bit weights as they are stored, for rows that lie together: unsigned, 128 more than they are.
struct StoredBytes {
    static constexpr int TOGETHER = ROWS;
    static constexpr int64_t HEAD = 2 * PANEL, SIZE = HEAD + GROUP * PANEL;

    static vf scale(const uint8_t* w, int) { return vload_f16(reinterpret_cast<const uint16_t*>(w)); }
    static vf minimum(const uint8_t* w, int v) { return vmul(scale(w, v), vset(-128.0f)); }

    template <int R>
    [[gnu::always_inline]] static void dots(vi (&dots)[R][NV], const Rows<ROWS>& x, const uint8_t* w) {
        FOLIO_UNROLL
        for (int t = 0; t < 8; t++) {
            if (R > 8) in_order();
            vi four = iflip(interleave2(iload(w + HEAD + t * 4 * PANEL)));  // they are stored in pairs
            FOLIO_UNROLL
            for (int r = 0; r < R; r++)
                dots[r][0] = dot4_spread(dots[r][0], four, x.x + t / 4 * SIDE * ROWS + x.at(r) + t % 4 * 4);
        }
    }
};
#endif

template <class Block, int R>
[[gnu::always_inline]] inline void add_block(Tile<R>& acc, const Rows<Block::TOGETHER>& x, const uint8_t* w) {
    vi dots[R][NV];
    clear(dots);
    Block::dots(dots, x, w);
    vf scale[NV], minimum[NV];
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++) scale[v] = Block::scale(w, v), minimum[v] = Block::minimum(w, v);
    add_scaled(acc, dots, scale, minimum, x);
}

// Rows `first … first + R` times a panel's blocks, at `w`, whatever they lie as: the same sums in the same order. Memory is
// asked for from `ahead` on, if there is any, `step` bytes a block.
template <class Block, int R>
[[gnu::noinline]] void blocks(const Activations& all, int64_t first, const uint8_t* w, const uint8_t* ahead, int64_t step,
                              float* out) {
    // Of a block in memory: what is expanded was smaller there.
    constexpr int LINES = Block::SIZE > 512 && !EXPANDS ? 9 : 5;
    Rows<Block::TOGETHER> x(all, first);
    Tile<R> total;  // in memory, where there are no registers for it beside the sums of a few blocks
    clear(total);
    for (int64_t b = 0; b < all.groups; x.skip_scale()) {
        Tile<R> acc;
        clear(acc);
        int64_t end = std::min(b + BLOCKS, all.groups);
        for (; b < end; b++, w += Block::SIZE, x.skip_group()) {
            for (int line = 0; line < LINES && ahead; line++) __builtin_prefetch(ahead + b * step + 64 * line);
            add_block<Block>(acc, x, w);
        }
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) total.v[r][v] = vfma(acc.v[r][v], vset(x.scale_of(r)), total.v[r][v]);
    }
    write(total, out, PANEL);
}

template <bool MINIMA>
void expand_blocks(const uint8_t* w, int64_t count, uint8_t* out) {
    using From = Stored<MINIMA, 0>;
    for (int64_t b = 0; b < count; b++, w += From::SIZE, out += Expanded::SIZE) {
        float* head = reinterpret_cast<float*>(out);
        for (int v = 0; v < NV; v++)
            vstore(head + v * LANES, From::scale(w, v)), vstore(head + PANEL + v * LANES, From::minimum(w, v));
        for (int t = 0; t < 4; t++)
            for (int v = 0; v < NV; v++) {
                vi all = iload(w + From::HEAD + t * 64 + v * 4 * LANES);
                istore(out + Expanded::HEAD + (t * NV + v) * 4 * LANES, ilow4(all));
                istore(out + Expanded::HEAD + ((4 + t) * NV + v) * 4 * LANES, ihigh4(all));
            }
    }
}

int64_t block_size(const FolioWeight& weight) { return packed_bytes(weight.format, PANEL, GROUP); }

}  // namespace

void multiply_nibbles(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, bool ahead,
                      float* out) {
    const uint8_t *w = panel_data(weight, panel), *next = ahead ? panel_data(weight, panel + 1) : nullptr;
    int64_t step = block_size(weight);
    bool minima = weight.format == FOLIO_Q4_1;
    if (x.together == 1)
        with_rows<ROWS4>(rows, [&]<int R>() {
            auto* product = minima ? blocks<Stored<true, 0>, R> : blocks<Stored<false, 0>, R>;
            product(x, first, w, w + AHEAD, step, out);
        });
#if defined(FOLIO_AVX512)
    else
        with_rows<ROWS>(rows, [&]<int R>() {
            auto* product = weight.format == FOLIO_Q8_0 ? blocks<StoredBytes, R>
                            : minima                    ? blocks<Stored<true, ROWS>, R>
                                                        : blocks<Stored<false, ROWS>, R>;
            product(x, first, w, next, step, out);
        });
#endif
    add_outliers(weight, panel, x, first, rows, out);
}

void expand(const FolioWeight& weight, int64_t panel, std::vector<uint8_t>& expanded) {
    int64_t count = (weight.k + GROUP - 1) / GROUP;
    if (int64_t size = count * Expanded::SIZE; int64_t(expanded.size()) < size) expanded.resize(size_t(size));
    auto* made = weight.format == FOLIO_Q4_0 ? expand_blocks<false> : expand_blocks<true>;
    made(panel_data(weight, panel), count, expanded.data());
}

void multiply_expanded(const FolioWeight& weight, int64_t panel, const uint8_t* expanded, const Activations& x, int64_t first,
                       int64_t rows, bool ahead, float* out) {
    if constexpr (EXPANDS) {
        const uint8_t* next = ahead ? panel_data(weight, panel + 1) : nullptr;
        with_rows<ROWS>(rows, [&]<int R>() { blocks<Expanded, R>(x, first, expanded, next, block_size(weight), out); });
        add_outliers(weight, panel, x, first, rows, out);
    }
}

}  // namespace folio
