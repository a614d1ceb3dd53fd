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

    int64_t row(int64_t r) const { return TOGETHER ? 4 * r : r * ldx; }
    int64_t group(int64_t r) const { return TOGETHER ? r : r * groups; }
    void skip(int64_t count) {
        constexpr int SIDE = TOGETHER ? TOGETHER : 1;
        x += count * GROUP * SIDE, scale += count * SIDE, sum += count * SIDE;
    }
    // The rows from the r-th on.
    GroupRows from(int64_t r) const { return {x + row(r), scale + group(r), sum + group(r), ldx, groups}; }
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

// A block of weights as they are stored: scales, minima where the format has them, nibbles.
template <bool MINIMA, int SIDE_BY_SIDE>
struct Stored {
    static constexpr int TOGETHER = SIDE_BY_SIDE;
    static constexpr int64_t HEAD = MINIMA ? 64 : 32, SIZE = HEAD + 256;

    static vf scale(const uint8_t* w, int v) { return vload_f16(reinterpret_cast<const uint16_t*>(w) + v * LANES); }
    static vf minimum(const uint8_t* w, int v) {
        return MINIMA ? vload_f16(reinterpret_cast<const uint16_t*>(w) + PANEL + v * LANES) : vmul(scale(w, v), vset(-8.0f));
    }

    template <int R>
    [[gnu::always_inline]] static void dots(vi (&dots)[R][NV], const GroupRows<TOGETHER>& x, const uint8_t* w) {
        constexpr int SIDE = TOGETHER ? TOGETHER : 1;
        FOLIO_UNROLL
        for (int t = 0; t < 4; t++)
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) {
                if (R > 8) in_order();  // fewer rows leave registers for more weights
                vi all = iload(w + HEAD + t * 64 + v * 4 * LANES), low = ilow4(all), high = ihigh4(all);
                FOLIO_UNROLL
                for (int r = 0; r < R; r++) {
                    const int8_t* four = x.x + x.row(r) + 4 * SIDE * t;
                    dots[r][v] = dot4_spread(dots[r][v], low, four);
                    dots[r][v] = dot4_spread(dots[r][v], high, four + 16 * SIDE);
                }
            }
    }
};

// A block of expanded weights: scales and minima as floats, then a byte a weight. The rows of a tile lie together.
struct Expanded {
    static constexpr int TOGETHER = ROWS;
    static constexpr int64_t HEAD = 2 * 4 * PANEL, SIZE = HEAD + GROUP * PANEL;

    static vf scale(const uint8_t* w, int v) { return vload(reinterpret_cast<const float*>(w) + v * LANES); }
    static vf minimum(const uint8_t* w, int v) { return vload(reinterpret_cast<const float*>(w) + PANEL + v * LANES); }

    template <int R>
    [[gnu::always_inline]] static void dots(vi (&dots)[R][NV], const GroupRows<ROWS>& x, const uint8_t* w) {
        FOLIO_UNROLL
        for (int t = 0; t < 8; t++) {
            vi part[NV];
            FOLIO_UNROLL
            for (int v = 0; v < NV; v++) part[v] = iload(w + HEAD + (t * NV + v) * 4 * LANES);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) {
                vi four = ispread4(x.x + 4 * ROWS * t + x.row(r));
                FOLIO_UNROLL
                for (int v = 0; v < NV; v++) dots[r][v] = dot4(dots[r][v], part[v], four);
            }
        }
    }
};

template <class Block, int R>
[[gnu::always_inline]] inline void add_block(Tile<R>& acc, const GroupRows<Block::TOGETHER>& x, const uint8_t* w) {
    vi dots[R][NV];
    clear(dots);
    Block::dots(dots, x, w);
    vf scale[NV], minimum[NV];
    FOLIO_UNROLL
    for (int v = 0; v < NV; v++) scale[v] = Block::scale(w, v), minimum[v] = Block::minimum(w, v);
    add_scaled(acc, dots, scale, minimum, x);
}

// What 8 bits leave of a group, added to the sums of those rows that have some: few groups do.
template <class Block, int R>
struct Rest {
    GroupRows<Block::TOGETHER> x;
    const uint64_t* fine;
    int64_t words, block;
    const uint8_t* w;

    Rest(const Activations& all, int64_t first, int64_t at, const uint8_t* weights)
        : x(rows_from<Block::TOGETHER>(all, all.rest, first)), fine(all.fine.data() + first * all.words() + at / 64),
          words(all.words()), block(at), w(weights) {
        x.skip(at);
    }

    [[gnu::always_inline]] void add_to(Tile<R>& acc, int r) const {
        if (!(fine[r * words] >> block % 64 & 1)) return;
        Tile<1> one;
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) one.v[0][v] = acc.v[r][v];
        add_block<Block>(one, x.from(r), w);
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) acc.v[r][v] = one.v[0][v];
    }

    // With few registers: by value, or all sums would have to lie in memory all the time.
    [[gnu::noinline]] Tile<R> added_to(Tile<R> acc) const {
        for (int r = 0; r < R; r++) add_to(acc, r);
        return acc;
    }
};

// Rows `first … first + R` times a panel's blocks, at `w`, whatever they lie as: the same sums in the same order. Memory is
// asked for from `ahead` on, if there is any, `step` bytes a block.
template <class Block, int R>
[[gnu::noinline]] void blocks(const Activations& all, int64_t first, const uint8_t* w, const uint8_t* ahead, int64_t step,
                              float* out) {
    auto x = rows_from<Block::TOGETHER>(all, all.s8, first);
    int64_t words = all.words();
    const uint64_t* fine = all.fine.data() + first * words;
    Tile<R> acc;
    clear(acc);
    uint64_t any = 0;
    for (int64_t b = 0; b < all.groups; b++, any >>= 1, w += Block::SIZE, x.skip(1)) {
        if (b % 64 == 0) any = any_fine<R>(fine, words, b);
        for (int line = 0; line < 5 && ahead; line++) __builtin_prefetch(ahead + b * step + 64 * line);
        add_block<Block>(acc, x, w);
        if (!(any & 1)) continue;
        Rest<Block, R> rest(all, first, b, w);
        if constexpr (EXPANDS)
            acc = rest.added_to(acc);
        else
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) rest.add_to(acc, r);
    }
    write(acc, out, PANEL);
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

int64_t block_size(const FolioWeight& weight) {
    return weight.format == FOLIO_Q4_0 ? Stored<false, 0>::SIZE : Stored<true, 0>::SIZE;
}

}  // namespace

void multiply_nibbles(const FolioWeight& weight, int64_t panel, const Activations& x, int64_t first, int64_t rows, bool ahead,
                      float* out) {
    const uint8_t *w = panel_data(weight, panel), *next = ahead ? panel_data(weight, panel + 1) : nullptr;
    bool minima = weight.format == FOLIO_Q4_1;
    if (x.together == 1) {
        with_rows<ROWS4>(rows, [&]<int R>() {
            auto* product = minima ? blocks<Stored<true, 0>, R> : blocks<Stored<false, 0>, R>;
            product(x, first, w, w + AHEAD, block_size(weight), out);
        });
    } else if constexpr (!EXPANDS) {
        with_rows<ROWS>(rows, [&]<int R>() {
            auto* product = minima ? blocks<Stored<true, ROWS>, R> : blocks<Stored<false, ROWS>, R>;
            product(x, first, w, next, block_size(weight), out);
        });
    }
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
    }
}

}  // namespace folio
