#include "octets.h"

#include <algorithm>

#include "blocks.h"
#include "linear.h"
#include "nibbles.h"
#include "tile.h"
#include "tiles.h"

namespace folio {

#if defined(FOLIO_AVX512)

namespace {

constexpr int64_t SIZE = GROUP * PANEL;  // bytes of a block of weights; a scale a WIDE goes before its blocks
constexpr int64_t HEAD = 4 * PANEL;

// Sums of R rows with P panels.
template <int R, int P>
struct Sums {
    vi v[R][P];
};

template <int R, int P>
[[gnu::always_inline]] inline void add_block(Sums<R, P>& sums, const int8_t* x, const uint8_t* const (&w)[P]) {
    FOLIO_UNROLL
    for (int t = 0; t < GROUP / 4; t++) {
        in_order();
        vi weights[P];
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) weights[p] = iload(w[p] + t * 4 * PANEL);
        FOLIO_UNROLL
        for (int r = 0; r < R; r++) {
            vi four = ispread4(x + (t / 4 * ROWS + r) * SIDE + t % 4 * 4);
            FOLIO_UNROLL
            for (int p = 0; p < P; p++) sums.v[r][p] = dot4_bytes(sums.v[r][p], weights[p], four);
        }
    }
}

template <int R, int P>
[[gnu::noinline]] void multiply(const Activations& all, const TileOutliers::Tile& outliers, int64_t first,
                                const OctetPanel* panels) {
    int64_t tile = first / ROWS * ROWS, half = first % ROWS;
    Rows<ROWS> x(all, tile);
    x.x += half * SIDE, x.scale += half;
    const int32_t* offset = all.s8.offset.data() + tile * all.wides + half;
    const uint8_t* w[P];
    vf acc[R][P];
    FOLIO_UNROLL
    for (int p = 0; p < P; p++) w[p] = panels[p].octets;
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) acc[r][p] = vzero();
    for (int64_t i = 0; i < outliers.count; i++)
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) {
            vf column = vload(panels[p].columns + outliers.columns[i] * PANEL);
            FOLIO_UNROLL
            for (int r = 0; r < R; r++) acc[r][p] = vfma(vset(outliers.values[i * OCTET_TILE + r]), column, acc[r][p]);
        }
    for (int64_t b = 0; b < all.groups; x.skip_scale(), offset += ROWS) {
        Sums<R, P> sums;
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int p = 0; p < P; p++) sums.v[r][p] = iset(offset[r]);
        vf scale[P];
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) scale[p] = vload(reinterpret_cast<const float*>(w[p])), w[p] += HEAD;
        for (int64_t end = std::min(b + BLOCKS, all.groups); b < end; b++, x.x += GROUP * ROWS) {
            add_block(sums, x.x, w);
            FOLIO_UNROLL
            for (int p = 0; p < P; p++) w[p] += SIZE;
        }
        FOLIO_UNROLL
        for (int r = 0; r < R; r++)
            FOLIO_UNROLL
            for (int p = 0; p < P; p++)
                acc[r][p] = vfma(vmul(ifloat(sums.v[r][p]), vset(x.scale_of(r))), scale[p], acc[r][p]);
    }
    FOLIO_UNROLL
    for (int r = 0; r < R; r++)
        FOLIO_UNROLL
        for (int p = 0; p < P; p++) vstore(panels[p].out + r * PANEL, acc[r][p]);
}

template <int P>
void multiply_panels(const OctetPanel* panels, const Activations& x, const TileOutliers& outliers, int64_t first,
                     int64_t rows) {
    with_rows<int(OCTET_TILE)>(rows, [&]<int R>() { multiply<R, P>(x, outliers.of(first), first, panels); });
}

template <bool MINIMA>
void make(const uint8_t* w, int64_t groups, uint8_t* to) {
    using From = Stored<MINIMA, 0>;
    for (int64_t b = 0; b < groups;) {
        int64_t end = std::min(b + BLOCKS, groups);
        vf top = vzero();
        for (const uint8_t* block = w; block < w + (end - b) * From::SIZE; block += From::SIZE) {
            vf minimum = From::minimum(block, 0), maximum = vfma(From::scale(block, 0), vset(15.0f), minimum);
            top = vmax(top, vmax(vabs(minimum), vabs(maximum)));
        }
        vstore(reinterpret_cast<float*>(to), vmul(top, vset(1.0f / 127)));
        to += HEAD;
        // In 16 bits, of which the upper 8 are a byte: 256 times what a nibble means, and half a byte more, to round.
        vf inverse = vwhere_ge(top, vset(1e-30f), vdiv(vset(127.0f * 256), top));
        for (; b < end; b++, w += From::SIZE, to += SIZE) {
            vi factor = ipairs(vmul(From::scale(w, 0), inverse));
            vi addend = ipairs(vfma(From::minimum(w, 0), inverse, vset(128.5f * 256)));
            FOLIO_UNROLL
            for (int t = 0; t < GROUP / 8; t++) {
                vi low, high;
                scale_nibbles(iload(w + From::HEAD + t * 64), factor, addend, low, high);
                istore(to + t * 64, low), istore(to + SIZE / 2 + t * 64, high);
            }
        }
    }
}

}  // namespace

bool in_octets(const FolioLinear& linear, int64_t rows) {
    return rows >= OCTET_ROWS && !one_order &&
           std::all_of(linear.parts, linear.parts + linear.num_parts, has_nibbles);
}

void make_octets(const FolioWeight& weight, int64_t panel, Aligned<uint8_t>& octets) {
    int64_t groups = (weight.k + GROUP - 1) / GROUP, size = (groups + BLOCKS - 1) / BLOCKS * HEAD + groups * SIZE;
    if (int64_t(octets.size()) < size) octets.resize(size_t(size));
    (weight.format == FOLIO_Q4_0 ? make<false> : make<true>)(panel_data(weight, panel), groups, octets.data());
}

void multiply_octets(const OctetPanel* panels, int64_t count, const Activations& x, const TileOutliers& outliers,
                     int64_t first, int64_t rows) {
    (count == 1 ? multiply_panels<1> : multiply_panels<2>)(panels, x, outliers, first, rows);
}

#else  // no products of four bytes that sum without overflow in between

bool in_octets(const FolioLinear&, int64_t) { return false; }
void make_octets(const FolioWeight&, int64_t, Aligned<uint8_t>&) {}
void multiply_octets(const OctetPanel*, int64_t, const Activations&, const TileOutliers&, int64_t, int64_t) {}

#endif

}  // namespace folio
